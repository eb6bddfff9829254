"""Tensors between two processes: memory that both map, and where in it each tensor lies.

One side packs, the other unpacks, in turns: what was unpacked lasts until the other side packs again. A region has no
name in any file system, so nothing of it is left when both are gone, however they go. It grows to the largest batch,
and stays. Knows nothing of what the tensors are for.
"""

import mmap
import os
import tempfile
from collections.abc import Callable, Sequence
from multiprocessing.reduction import DupFd
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..runtime import Arrays

_ALIGNMENT = 64
_INITIAL_BYTES = 1 << 16
"""Bytes of a region in which nothing was packed yet."""

_GROWTH_BYTES = 1 << 20
_LENGTH = np.dtype("<u4")

WriteTensor: TypeAlias = Callable[[mmap.mmap, int], None]
"""Puts a tensor into memory, from an offset on."""


class PackedTensor(msgspec.Struct, frozen=True, array_like=True):
    """Where an array lies: `size` bytes from `offset` on. `dtype`: numpy's; of objects, which are `bytes`, the region
    has all lengths, as little-endian uint32, and then all contents."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


class TensorArena:
    """One direction of one instance. `descriptor`: of the memory, which is the region's from then on."""

    def __init__(self, descriptor: int | None = None) -> None:
        self.descriptor = _anonymous_file() if descriptor is None else descriptor
        if descriptor is None:
            _reserve(self.descriptor, _INITIAL_BYTES)
        self._map = mmap.mmap(self.descriptor, 0)

    def __reduce__(self) -> tuple[Any, ...]:
        """For a process that is being spawned."""
        return _from_descriptor, (DupFd(self.descriptor),)

    def pack(self, arrays: Arrays) -> tuple[PackedTensor, ...]:
        """Over whatever was there.

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
        self._grow(end)
        for each, write in zip(packed, writes, strict=True):
            write(self._map, each.offset)
        return tuple(packed)

    def unpack(self, packed: Sequence[PackedTensor], copy: bool) -> dict[str, NDArray[Any]]:
        """What the other side packed; without `copy` numbers are read-only views."""
        end = max((each.offset + each.size for each in packed), default=0)
        if end > len(self._map):
            self._map = mmap.mmap(self.descriptor, 0)
        return {each.name: _unpack(self._map, each, copy) for each in packed}

    def close(self) -> None:
        """Views stay good: the mapping goes with the last of them."""
        os.close(self.descriptor)
        del self._map

    def _grow(self, size: int) -> None:
        if size > len(self._map):
            _reserve(self.descriptor, -(-(size + size // 4) // _GROWTH_BYTES) * _GROWTH_BYTES)
            self._map = mmap.mmap(self.descriptor, 0)


def _from_descriptor(duplicate: Any) -> TensorArena:
    return TensorArena(duplicate.detach())


def _anonymous_file() -> int:
    """A file without a name; in memory, where the system can."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("charonia-tensors")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _reserve(file: int, size: int) -> None:
    """Memory that is only promised would end the process that touches it in vain."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)


def _number_writer(array: NDArray[Any]) -> tuple[int, WriteTensor]:
    def write(memory: mmap.mmap, offset: int) -> None:
        np.ndarray(array.shape, array.dtype, memory, offset)[...] = array

    return array.nbytes, write


def _object_writer(name: str, array: NDArray[Any]) -> tuple[int, WriteTensor]:
    items = array.ravel().tolist()
    if not all(isinstance(item, bytes) for item in items):
        raise TypeError(f"tensor '{name}' must hold bytes, and nothing else")
    whole = np.array([len(item) for item in items], _LENGTH).tobytes() + b"".join(items)

    def write(memory: mmap.mmap, offset: int) -> None:
        memory[offset : offset + len(whole)] = whole

    return len(whole), write


def _unpack(memory: mmap.mmap, packed: PackedTensor, copy: bool) -> NDArray[Any]:
    dtype = np.dtype(packed.dtype)
    if dtype.hasobject:
        return _read_objects(memory[packed.offset : packed.offset + packed.size], packed.shape)
    view: NDArray[Any] = np.ndarray(packed.shape, dtype, memory, packed.offset)
    if copy:
        return view.copy()
    view.flags.writeable = False
    return view


def _read_objects(whole: bytes, shape: tuple[int, ...]) -> NDArray[Any]:
    made = np.empty(shape, object)
    count = made.size
    start = count * _LENGTH.itemsize
    ends = (start + np.cumsum(np.frombuffer(whole, _LENGTH, count), dtype=np.int64)).tolist()
    made.ravel()[:] = [whole[begin:end] for begin, end in zip([start, *ends], ends, strict=False)]
    return made
