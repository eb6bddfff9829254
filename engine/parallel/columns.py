"""Columns of integers as few bytes. Knows nothing of what they count.

Each is written as its least value and, for every value, the distance from it in as few bytes as the largest distance
takes: none at all if the values are equal.
"""

from collections.abc import Sequence
from itertools import accumulate
from struct import Struct
from typing import Any, TypeAlias

import numpy as np

from ...scheduler.plan import IntArray

Bytes: TypeAlias = bytes | memoryview

_HEAD = Struct("<BIi")  # bytes of each distance, how many, the least value
_EMPTY = _HEAD.pack(0, 0, 0)
_NARROW: dict[int, np.dtype[np.unsignedinteger[Any]]] = {
    1: np.dtype(np.uint8),
    2: np.dtype(np.uint16),
    4: np.dtype(np.uint32),
}
"""Little-endian, as every machine that we compute on."""


def pack(columns: Sequence[IntArray]) -> bytes:
    """Columns [n], int32, one after the other."""
    filled = [column for column in columns if len(column)]
    if not filled:
        return _EMPTY * len(columns)
    together = np.concatenate(filled)
    begins = list(accumulate(map(len, filled[:-1]), initial=0))
    least = iter(np.minimum.reduceat(together, begins).tolist())
    most = iter(np.maximum.reduceat(together, begins).tolist())
    return b"".join(_written(column, next(least), next(most)) if len(column) else _EMPTY for column in columns)


def _written(column: IntArray, least: int, most: int) -> bytes:
    width = ((most - least).bit_length() + 7) // 8
    head = _HEAD.pack(width, len(column), least)
    if not width:
        return head
    distances = (column - np.int32(least)).view(np.uint32)  # beyond int32 it wraps, and back again where it is read
    if width in _NARROW:
        narrow: bytes = distances.astype(_NARROW[width]).tobytes()
        return head + narrow
    return head + distances.view(np.uint8).reshape(-1, 4)[:, :width].tobytes()


class Columns:
    """Reads one column after the other."""

    def __init__(self, message: Bytes, place: int = 0) -> None:
        self._message, self._place = message, place

    def next(self) -> IntArray:
        """[n], int32"""
        width, count, least = _HEAD.unpack_from(self._message, self._place)
        begin = self._place + _HEAD.size
        self._place = begin + width * count
        if not width:
            equal: IntArray = np.empty(count, np.int32)
            equal.fill(least)  # half of what np.full takes
            return equal
        return self._distances(width, count, begin) + np.int32(least)

    def _distances(self, width: int, count: int, begin: int) -> IntArray:
        if width in _NARROW:
            return np.frombuffer(self._message, _NARROW[width], count, begin).astype(np.uint32).view(np.int32)
        wide = np.zeros((count, 4), np.uint8)
        wide[:, :width] = np.frombuffer(self._message, np.uint8, count * width, begin).reshape(count, width)
        return wide.view(np.uint32)[:, 0].view(np.int32)

    @property
    def rest(self) -> memoryview:
        """What comes after the columns that were read."""
        return memoryview(self._message)[self._place :]
