"""Sequence batching: requests of one sequence go to one instance, with its control and state tensors."""
