"""Attention backends: each alone allocates, writes, reads and copies its cache tensors."""
