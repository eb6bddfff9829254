"""Attention memory in blocks: which block holds which tokens of which sequence. Knows no tensors."""
