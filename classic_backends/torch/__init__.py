"""TorchScript and exported torch models."""
