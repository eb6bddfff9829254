"""Real servers, with the checkpoints of tests/e2e."""

from ....e2e.conftest import checkpoint, loras, tokenizer_only

__all__ = ["checkpoint", "loras", "tokenizer_only"]
