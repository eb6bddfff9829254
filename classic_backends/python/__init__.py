"""Python models: `model.py` files as Triton runs them, each instance in a process of its own."""
