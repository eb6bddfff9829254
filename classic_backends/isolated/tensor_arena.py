"""Tensors between two processes: memory that both map, and where in it each tensor lies.

One side packs, the other unpacks, in turns: what was unpacked lasts until the other side packs again. The memory grows
to the largest batch, and stays. Knows nothing of what the tensors are for.
"""

import mmap
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ...processes.shared_arena import SharedArena
from ..runtime import Arrays

_ALIGNMENT = 64
_LENGTH = np.dtype("<u4")


class PackedTensor(msgspec.Struct, frozen=True, array_like=True):
    """The place of one array: `size` bytes from `offset` on. `dtype` is numpy's name. An array of objects, which are
    `bytes`, lies there as all lengths, little-endian uint32, and then all contents."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


class TensorArena(SharedArena):
    """Tensors on their way between the server and an isolated instance, in one direction."""

    def pack(self, arrays: Arrays) -> tuple[PackedTensor, ...]:
        """Write the arrays over the former ones.

        Raises:
            OSError: there is no memory for them.
            TypeError: an element of an array of objects is not `bytes`.
        """
        packed, writes, end = [], [], 0
        for name, array in arrays.items():
            size, write = _object_writer(name, array) if array.dtype.hasobject else _number_writer(array)
            packed.append(PackedTensor(name, array.dtype.str, array.shape, end, size))
            writes.append(write)
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self.require(end)
        for each, write in zip(packed, writes, strict=True):
            write(self.memory, each.offset)
        return tuple(packed)

    def unpack(self, packed: Sequence[PackedTensor], copy: bool) -> dict[str, NDArray[Any]]:
        """The arrays that the other side packed; without `copy` numbers are read-only views."""
        self.follow(max((each.offset + each.size for each in packed), default=0))
        return {each.name: _unpack(self.memory, each, copy) for each in packed}


def _number_writer(array: NDArray[Any]) -> tuple[int, Callable[[mmap.mmap, int], None]]:
    """The array's bytes in memory, and a function that writes them there at an offset."""

    def write(memory: mmap.mmap, offset: int) -> None:
        np.ndarray(array.shape, array.dtype, memory, offset)[...] = array

    return array.nbytes, write


def _object_writer(name: str, array: NDArray[Any]) -> tuple[int, Callable[[mmap.mmap, int], None]]:
    """As `_number_writer`, for an array of `bytes`."""
    items = array.ravel().tolist()
    if not all(isinstance(item, bytes) for item in items):
        raise TypeError(f"tensor '{name}' must hold bytes, and nothing else")
    whole = np.array([len(item) for item in items], _LENGTH).tobytes() + b"".join(items)

    def write(memory: mmap.mmap, offset: int) -> None:
        memory[offset : offset + len(whole)] = whole

    return len(whole), write


def _unpack(memory: mmap.mmap, packed: PackedTensor, copy: bool) -> NDArray[Any]:
    dtype = np.dtype(packed.dtype)
    if not dtype.hasobject:
        view: NDArray[Any] = np.ndarray(packed.shape, dtype, memory, packed.offset)
        view.flags.writeable = False
        return view.copy() if copy else view
    whole = memory[packed.offset : packed.offset + packed.size]
    objects = np.empty(packed.shape, object)
    start = objects.size * _LENGTH.itemsize
    ends = (start + np.cumsum(np.frombuffer(whole, _LENGTH, objects.size), dtype=np.int64)).tolist()
    objects.ravel()[:] = [whole[begin:end] for begin, end in zip([start, *ends], ends, strict=False)]
    return objects
