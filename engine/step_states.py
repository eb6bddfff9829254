"""Which recurrent states the rows of a step begin with and leave: what kernels, layers and worker share.

A layer's states are tensors with a line for each slot: first those of the rows, by their numbers (`StepBatch.rows`),
then those of the snapshots. `cpu/recurrent.py` says what a slot holds.
"""

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ..scheduler.plan import IntArray

SaveArray: TypeAlias = NDArray[np.int32]
"""[V, 3] (index of the row in the step, its tokens in this step before the save, slot), by row and then by tokens."""


class StepStates:
    """The states of a step's R rows. Each row's state goes into the slot of its row's number when its tokens are
    computed; a state is read before any is written that another row reads."""

    def __init__(self, sources: ArrayLike, saves: ArrayLike = ()) -> None:
        """`sources` [R]: the slot that each row's state is read from, its own or a snapshot; -1: it begins as zeros,
        whatever its slot holds. `saves` [V, 3], a `SaveArray` in any order: copies of states on the way, each after at
        least one token, into slots that no row reads."""
        self.sources: IntArray = np.ascontiguousarray(sources, np.int32)
        rows = np.asarray(saves, np.int32).reshape(-1, 3)
        self.saves: SaveArray = rows[np.lexsort((rows[:, 1], rows[:, 0]))]
        self._columns = [np.ascontiguousarray(self.saves[:, column]) for column in (1, 2)]
        self._begins = np.searchsorted(self.saves[:, 0], np.arange(len(self.sources) + 1)).astype(np.int64)

    @property
    def c_fields(self) -> tuple[int, ...]:
        """The fields of `StateMoves` (recurrent.h): valid as long as this object lives."""
        columns: tuple[NDArray[Any], ...] = (self.sources, self._begins, *self._columns)
        return tuple(column.ctypes.data for column in columns)

    def pack(self, width: int) -> IntArray:
        """For kernels of a GPU, int32 [5, width]: sources, where each row's saves begin and end, and of the saves
        tokens and slots. `width` is at least R and V."""
        packed: IntArray = np.zeros((5, width), np.int32)
        rows, saves = len(self.sources), len(self.saves)
        packed[:3, :rows] = self.sources, self._begins[:-1], self._begins[1:]
        packed[3:, :saves] = self._columns
        return packed
