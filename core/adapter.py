"""A LoRA adapter (arXiv 2106.09685) that an engine holds: what its clients, and the folders above it, know of it."""

import msgspec


class Adapter(msgspec.Struct, frozen=True):
    """An adapter under the `name` that requests give it. `path`: the directory it was read from. `digest`: hexadecimal
    SHA-256 of what was read; equal digests are equal computations. `rank`: the largest of its matrices. `bytes`: of
    memory that it takes in one replica."""

    name: str
    path: str
    digest: str
    rank: int
    bytes: int
