"""Sequences whose tokens the host follows, as under a grammar: what they are in steps. A step without any asks nothing
of it."""
