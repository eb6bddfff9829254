"""Architectures: a page for each family over shared layers, and transformers for all others."""
