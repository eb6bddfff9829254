"""Memory that the server and a model's process both map, one for each direction, in blocks.

The `BlockWriter` of one side allocates blocks, the `BlockReader` of the other makes arrays over them. A block is
released with the last of its arrays. The memory grows to what is in use at once, until it is trimmed.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import weakref
from bisect import bisect_left
from collections import deque
from typing import Any, Callable, Iterable, Iterator

import numpy as np

from .messages import TensorMessage

ALIGNMENT = 64
_LENGTH = np.dtype("<u4")
_PIECE = 1 << 14

NUMPY_TYPES = {
    "BOOL": np.dtype(np.bool_),
    **{f"UINT{8 * size}": np.dtype(f"u{size}") for size in (1, 2, 4, 8)},
    **{f"INT{8 * size}": np.dtype(f"i{size}") for size in (1, 2, 4, 8)},
    **{f"FP{8 * size}": np.dtype(f"f{size}") for size in (2, 4, 8)},
    "BYTES": np.dtype(np.object_),
    "BF16": np.dtype(np.uint16),
}
"""Numpy's types by the v2 protocol's names. BF16, which numpy lacks, are the bits."""

V2_NAMES = {dtype: name for name, dtype in NUMPY_TYPES.items() if name != "BF16"}


class BlockWriter:
    """Allocates blocks of the memory behind `descriptor` and writes tensors into them. Thread-safe.

    `size` is the memory's at the start, `growth` the least by which it grows, both in bytes.
    """

    def __init__(self, descriptor: int, size: int = 1 << 20, growth: int = 1 << 20) -> None:
        self._descriptor = descriptor
        self._growth = growth
        self._closed = False
        self._lock = threading.Lock()
        self._used: dict[int, int] = {}
        self._free: list[tuple[int, int]] = []  # (offset, size), by offset, no two of them adjacent
        self._end = 0
        self._grow(size)
        self._first_end = self._end

    def write(self, name: str, datatype: str, array: np.ndarray[Any, Any]) -> TensorMessage:
        """Write a tensor into a new block.

        Raises:
            MemoryError: the system has no more memory.
            TypeError: an element of a BYTES tensor is not `bytes`.
        """
        shape = list(array.shape)
        if datatype != "BYTES":
            offset = self._allocate(array.nbytes)
            np.ndarray(array.shape, array.dtype, self._memory, offset)[...] = array
            return TensorMessage(name, datatype, shape, offset, array.nbytes)
        parts = [_joined_bytes(name, piece) for piece in _pieces(array.ravel())]
        size = sum(len(part) for pair in parts for part in pair)
        offset = place = self._allocate(size)
        memory = self._memory
        for part in (*(lengths for lengths, _ in parts), *(contents for _, contents in parts)):
            memory[place : place + len(part)] = part
            place += len(part)
        return TensorMessage(name, datatype, shape, offset, size)

    def write_all(self, tensors: Iterable[tuple[str, str, np.ndarray[Any, Any]]]) -> list[TensorMessage]:
        """Write tensors as `write` does: all of them, or none where one fails."""
        written: list[TensorMessage] = []
        try:
            written.extend(self.write(*tensor) for tensor in tensors)
        except BaseException:
            self.release([tensor.offset for tensor in written])
            raise
        return written

    def release(self, offsets: Iterable[int]) -> None:
        """Take back blocks that the reader has done with."""
        with self._lock:
            for offset in offsets:
                self._free_range(offset, self._used.pop(offset))

    def trim(self) -> None:
        """Give back to the system what is free at the end of the memory, but for the size at the start."""
        with self._lock:
            free_from = self._free[-1][0] if self._free and sum(self._free[-1]) == self._end else self._end
            grown = max(0, free_from - self._first_end)
            end = self._first_end + -(-grown // self._growth) * self._growth
            if end >= self._end or self._closed:
                return
            os.ftruncate(self._descriptor, end)
            self._memory = mmap.mmap(self._descriptor, end)
            self._end = end
            self._free[-1:] = [(free_from, end - free_from)] if end > free_from else []

    def close(self) -> None:
        """Let go of the memory; nothing may be written any more."""
        with self._lock:
            self._closed = True  # the descriptor may be another file's soon
            del self._memory

    @property
    def used_bytes(self) -> int:
        with self._lock:
            return sum(self._used.values())

    @property
    def size(self) -> int:
        """The bytes of the memory."""
        return self._end

    def _allocate(self, size: int) -> int:
        size = max(1, -(-size // ALIGNMENT)) * ALIGNMENT
        with self._lock:
            index = next((index for index, (_, room) in enumerate(self._free) if room >= size), None)
            if index is None:
                last_free = self._free[-1][1] if self._free and sum(self._free[-1]) == self._end else 0
                self._grow(size - last_free)
                index = len(self._free) - 1
            offset, room = self._free[index]
            self._free[index : index + 1] = [(offset + size, room - size)] if room > size else []
            self._used[offset] = size
        return offset

    def _free_range(self, offset: int, size: int) -> None:
        index = bisect_left(self._free, (offset, 0))
        if index < len(self._free) and self._free[index][0] == offset + size:
            size += self._free.pop(index)[1]
        if index and sum(self._free[index - 1]) == offset:
            index -= 1
            offset, room = self._free.pop(index)
            size += room
        self._free.insert(index, (offset, size))

    def _grow(self, size: int) -> None:
        grown = self._end + -(-size // self._growth) * self._growth
        try:
            # Memory that is only promised would end the process that touches it in vain.
            os.posix_fallocate(self._descriptor, 0, grown)
        except AttributeError:
            os.ftruncate(self._descriptor, grown)
        except OSError as error:
            reason = os.strerror(error.errno or errno.ENOMEM)
            raise MemoryError(f"Failed to increase the shared memory pool size to {grown} bytes: {reason}") from None
        self._memory = mmap.mmap(self._descriptor, grown)
        end = self._end
        self._end = grown
        self._free_range(end, grown - end)

    def check_integrity(self) -> None:
        """Recompute everything. Raises `AssertionError`."""
        with self._lock:
            ranges = sorted([*self._free, *self._used.items()])
            position = 0
            for offset, size in ranges:
                assert offset == position
                assert size > 0
                position += size
            assert position == self._end == len(self._memory)
            ends = {offset + size for offset, size in self._free}
            assert not ends & {offset for offset, _ in self._free}


class _Block:
    """The owner of one block in the eyes of numpy: every array over the block holds it."""

    def __init__(self, view: np.ndarray[Any, Any]) -> None:
        self._memory = view.base
        self.__array_interface__ = view.__array_interface__


class BlockReader:
    """Makes arrays over the blocks that the other side has written. Thread-safe.

    `on_release` is called, from whatever thread, when a block was released; `take_released` says which.
    """

    def __init__(self, descriptor: int, on_release: Callable[[], None] = lambda: None) -> None:
        self._descriptor = descriptor
        self._on_release = on_release
        self._memory = mmap.mmap(descriptor, 0) if os.fstat(descriptor).st_size else None
        self._released: deque[int] = deque()

    def read(self, tensor: TensorMessage) -> np.ndarray[Any, Any]:
        """The tensor's array, writable. Numbers are not copied; BYTES are, and their block is released at once."""
        end = tensor.offset + tensor.size
        if self._memory is None or end > len(self._memory):
            self._memory = mmap.mmap(self._descriptor, 0)
        dtype = NUMPY_TYPES[tensor.datatype]
        if dtype.hasobject:
            data = self._memory[tensor.offset : end]
            self._release(tensor.offset)
            return _split_bytes(data, tensor.shape)
        block = _Block(np.ndarray(tuple(tensor.shape), dtype, self._memory, tensor.offset))
        array = np.asarray(block)
        weakref.finalize(block, self._release, tensor.offset).atexit = False
        return array

    def discard(self, tensors: list[TensorMessage]) -> None:
        """Release the blocks of tensors that are not read."""
        for tensor in tensors:
            self._release(tensor.offset)

    def close(self) -> None:
        """Let go of the memory, which stays for the arrays over it; nothing may be read any more."""
        self._memory = None

    def take_released(self) -> list[int]:
        """The blocks released since the last call; for any thread."""
        released = []
        try:
            while True:  # not asked first whether there is one: another thread may take it in between
                released.append(self._released.popleft())
        except IndexError:
            return released

    @property
    def released_count(self) -> int:
        """How many released blocks `take_released` would return."""
        return len(self._released)

    def _release(self, offset: int) -> None:
        self._released.append(offset)
        self._on_release()


def _pieces(flat: np.ndarray[Any, Any]) -> Iterator[np.ndarray[Any, Any]]:
    """Views of some elements at a time: the interpreter's lock is kept for as long as each takes."""
    return (flat[begin : begin + _PIECE] for begin in range(0, flat.size, _PIECE))


def _joined_bytes(name: str, piece: np.ndarray[Any, Any]) -> tuple[bytes, bytes]:
    """The lengths of some elements, and their contents."""
    items = piece.tolist()
    for item in items:
        if not isinstance(item, bytes):
            raise TypeError(f"tensor '{name}' must hold bytes, not {type(item).__name__}")
    return np.array([len(item) for item in items], _LENGTH).tobytes(), b"".join(items)


def _split_bytes(whole: bytes, shape: list[int]) -> np.ndarray[Any, Any]:
    objects = np.empty(tuple(shape), np.object_)
    start = objects.size * _LENGTH.itemsize
    for piece, lengths in zip(_pieces(objects.ravel()), _pieces(np.frombuffer(whole, _LENGTH, objects.size))):
        ends = (start + np.cumsum(lengths, dtype=np.int64)).tolist()
        piece[:] = [whole[begin:end] for begin, end in zip([start, *ends], ends)]
        start = ends[-1]
    return objects
