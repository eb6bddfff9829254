"""Models of Triton's vLLM backend, by its files and tensors, on our own engine."""
