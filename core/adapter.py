"""A LoRA adapter (arXiv 2106.09685) that an engine holds: what its clients, and the folders above it, know of it."""

from dataclasses import dataclass
from typing import Any

import msgspec
from numpy.typing import NDArray


class Adapter(msgspec.Struct, frozen=True):
    """An adapter under the `name` that requests give it. `path`: the directory it was read from. `digest`: hexadecimal
    SHA-256 of what was read; equal digests are equal computations. `rank`: the largest of its matrices. `bytes`: of
    memory that it takes in one replica. The last three say nothing where TensorRT-LLM reads it."""

    name: str
    path: str
    digest: str
    rank: int
    bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class LoraTask:
    """An adapter that a client sends by itself, under a `number` of its own: with the first request for it the matrices
    as Triton's TensorRT-LLM backend has them, with others None."""

    number: int
    weights: NDArray[Any] | None = None
    config: NDArray[Any] | None = None
