"""Triton's gRPC service: what is read, answered and streamed over it."""
