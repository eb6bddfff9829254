"""LoRA adapters (arXiv 2106.09685), as clients and the rooms above the engine know them."""

from dataclasses import dataclass
from typing import Any

import msgspec
from numpy.typing import NDArray


class Adapter(msgspec.Struct, frozen=True):
    """A LoRA adapter that an engine holds. Where TensorRT-LLM reads it, `digest`, `rank` and `bytes` are empty."""

    name: str
    """The name that requests give it."""
    path: str
    """The directory that it was read from."""
    digest: str
    """The hexadecimal SHA-256 of its files: equal digests are equal computations."""
    rank: int
    """The largest rank of its matrices."""
    bytes: int
    """The memory that it takes in one replica."""


@dataclass(frozen=True, slots=True, eq=False)
class LoraTask:
    """An adapter that a client sends in its requests, under a number of its own. The first request for it carries the
    matrices, in the layout of Triton's TensorRT-LLM backend; later ones carry None."""

    number: int
    weights: NDArray[Any] | None = None
    config: NDArray[Any] | None = None
