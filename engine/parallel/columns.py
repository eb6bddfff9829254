"""Columns of integers as few bytes. Knows nothing of what they count.

The lowest bytes of all values come first, then the next ones, up to the highest that are not all 0: none of a column of
zeros. For some hundred values slices of bytes take less time than any call of numpy that looks at them.
"""

from struct import Struct
from typing import TypeAlias

import numpy as np

from ...scheduler.plan import IntArray

Bytes: TypeAlias = bytes | memoryview

_HEAD = Struct("<BI")  # bytes of each value, how many
_SIZE = Struct("<I")
_ZERO = b"\0"


def pack_column(column: IntArray) -> bytes:
    """A column [n], int32: little-endian, as every machine that we compute on."""
    return _packed(column.tobytes(), 0, 4)


def pack_pairs(pairs: IntArray) -> bytes:
    """Two columns side by side, [n, 2], int32."""
    wide = pairs.tobytes()
    return _packed(wide, 0, 8) + _packed(wide, 4, 8)


def _packed(wide: bytes, place: int, stride: int) -> bytes:
    """The column whose values are at `place` of every `stride` bytes."""
    planes = [wide[place::stride], wide[place + 1 :: stride], wide[place + 2 :: stride], wide[place + 3 :: stride]]
    count = len(planes[0])
    while planes and not planes[-1].strip(_ZERO):
        planes.pop()
    return _HEAD.pack(len(planes), count) + b"".join(planes)


def pack_bytes(content: bytes) -> bytes:
    """Something that is no column, in its place among them."""
    return _SIZE.pack(len(content)) + content


class ColumnReader:
    """Reads one column after the other."""

    def __init__(self, message: Bytes, place: int = 0) -> None:
        self._message, self.place = memoryview(message), place

    def next(self) -> IntArray:
        """[n], int32"""
        planes, count = self._head()
        wide = bytearray(4 * count)
        for plane in range(planes):
            wide[plane::4] = self._take(count)
        return np.frombuffer(wide, np.int32)

    def pairs(self) -> IntArray:
        """[n, 2], int32"""
        planes, count = self._head()
        wide = bytearray(8 * count)
        for plane in range(planes):
            wide[plane::8] = self._take(count)
        planes, count = self._head()
        for plane in range(4, 4 + planes):
            wide[plane::8] = self._take(count)
        return np.frombuffer(wide, np.int32).reshape(-1, 2)

    def bytes(self) -> memoryview:
        """What `pack_bytes` packed."""
        (size,) = _SIZE.unpack_from(self._message, self.place)
        self.place += _SIZE.size
        return self._take(size)

    def _head(self) -> tuple[int, int]:
        """Planes of the next column, and its values."""
        planes, count = _HEAD.unpack_from(self._message, self.place)
        self.place += _HEAD.size
        return planes, count

    def _take(self, size: int) -> memoryview:
        begin, self.place = self.place, self.place + size
        return self._message[begin : self.place]
