"""Computed prefixes on their way between two servers: one computes prompts, the other goes on. Knows no steps."""
