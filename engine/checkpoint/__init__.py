"""Checkpoints on disk: their configuration and weights, and how ranks share them."""
