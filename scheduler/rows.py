"""The running set as arrays indexed by row. Keeps the counters and their order; decides nothing."""

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from ..kvcache.manager import BlockTable
from .plan import IntArray
from .sequence import Sequence

BoolArray = NDArray[np.bool_]


class Rows:
    """`size` rows; a sequence keeps its row from admission until it ended or was preempted and nothing of it is in
    flight. Then row and blocks are free together, so a row in a late result always means whom it meant when planned.

    The positions of one sequence, cut by its counters:

        0 ........ committed ........ computed ........ scheduled ........ known ........ known + pending .. limit
        | findable  | in its blocks    | being computed  | to be scheduled  | sampled, seen    | not yet
        | by others | for itself only  | by plans in     | next             | by the device    | there
        |           |                  | flight          |                  | only             |

    `committed <= computed <= scheduled <= known + pending` and `computed < known`: computing the newest token is
    what samples its successor. (Until plans in flight are back, `scheduled` of an ended or held row counts on tokens
    that will not come.)
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.known = _counter(size)
        self.pending = _counter(size)
        self.scheduled = _counter(size)
        self.computed = _counter(size)
        self.committed = _counter(size)
        self.limit = _counter(size)
        self.capacity = _counter(size)  # tokens its blocks hold
        self.reserve = _counter(size)  # tokens its admission counted on
        self.in_flight = _counter(size)  # plans with this row and without a result
        self.announced = _counter(size)  # blocks the executor has been told of
        self.slot = _counter(size)  # its tenant's number
        self.running = _flag(size)  # occupied, and not about to leave
        self.ended = _flag(size)  # about to leave for good: takes no further token
        self.caught_up = _flag(size)  # was sampled in this stay: it decodes
        self.held = _flag(size)  # a result was not what later plans built on: not scheduled until they are back
        self.long = _flag(size)  # its prompt goes in the lane of long ones
        self.seniority = np.zeros(size, np.int64)
        self.number = np.zeros(size, np.int64)
        self.keys = [0] * size
        self.stops: list[frozenset[int]] = [frozenset()] * size
        self.outputs: list[list[int]] = [[] for _ in range(size)]  # each is its sequence's own list
        self.sequences: dict[int, Sequence] = {}
        self.tables: dict[int, BlockTable] = {}
        self._free = list(range(size))  # a heap

    @property
    def free(self) -> int:
        """Rows without a sequence."""
        return len(self._free)

    @property
    def leaving(self) -> list[int]:
        """Rows that wait for plans in flight before they are free."""
        return [row for row in self.sequences if not self.running[row]]

    def gaps(self, in_flight: int) -> IntArray:
        """[size] tokens each row could compute now, if less than `in_flight` plans hold it. The last token of all
        is never computed: nothing follows it."""
        gaps: IntArray = np.minimum(self.known + self.pending, self.limit - 1) - self.scheduled
        gaps[~self.running | self.held | (self.in_flight >= in_flight)] = 0
        return gaps

    def occupy(self, sequence: Sequence, table: BlockTable, reserve: int) -> int:
        """Give the sequence a row, everything its table shares being computed."""
        row = heappop(self._free)
        self.sequences[row], self.tables[row] = sequence, table
        self.keys[row], self.stops[row] = sequence.key, sequence.request.stop_token_ids
        self.outputs[row] = sequence.outputs
        self.known[row], self.limit[row] = sequence.known, sequence.limit
        self.scheduled[row] = self.computed[row] = self.committed[row] = self.capacity[row] = table.cached
        self.pending[row] = self.in_flight[row] = self.announced[row] = 0
        self.reserve[row], self.slot[row] = reserve, sequence.slot
        self.seniority[row], self.number[row] = sequence.seniority, sequence.number
        self.running[row] = True
        self.ended[row] = self.caught_up[row] = self.held[row] = self.long[row] = False
        sequence.row = row
        return row

    def vacate(self, row: int) -> tuple[Sequence, BlockTable]:
        """Free the row; its table is the caller's to close."""
        assert not self.in_flight[row]
        self.running[row] = False
        heappush(self._free, row)
        sequence = self.sequences.pop(row)
        sequence.row = None
        return sequence, self.tables.pop(row)

    def by_seniority(self, rows: IntArray | NDArray[np.int64]) -> list[int]:
        """The rows, the most senior first."""
        ordered: list[int] = rows[np.lexsort((self.number[rows], self.seniority[rows]))].tolist()
        return ordered

    def junior(self) -> int:
        """The youngest running row of the lowest class."""
        return self.by_seniority(np.flatnonzero(self.running))[-1]

    def claims(self, block_size: int) -> int:
        """Blocks that running rows were promised at admission and have not taken yet."""
        lacking = np.maximum(self.reserve - self.capacity, 0)[self.running]
        return int((-(-lacking // block_size)).sum())

    def check_integrity(self, block_size: int) -> None:
        """Recompute what can be.

        Raises:
            AssertionError: counters out of order, or rows and sequences apart.
        """
        occupied = sorted(self.sequences)
        assert sorted(self._free + occupied) == list(range(self.size))
        assert self.tables.keys() == self.sequences.keys()
        assert set(np.flatnonzero(self.running).tolist()) <= set(occupied)
        for row in occupied:
            self._check_row(row, block_size)

    def _check_row(self, row: int, block_size: int) -> None:
        sequence, table = self.sequences[row], self.tables[row]
        known, pending, scheduled = int(self.known[row]), int(self.pending[row]), int(self.scheduled[row])
        computed, committed, capacity = int(self.computed[row]), int(self.committed[row]), int(self.capacity[row])
        assert sequence.row == row
        assert 0 <= committed <= computed <= scheduled <= capacity
        assert computed < known <= sequence.limit == self.limit[row]
        assert known == sequence.known
        assert scheduled <= known + pending or self.ended[row] or self.held[row]
        assert 0 <= pending <= self.in_flight[row]
        assert capacity == len(table.blocks) * block_size
        assert committed == table.committed * block_size
        assert self.running[row] or self.in_flight[row], "a row that left stays occupied"
        assert not (self.running[row] and self.ended[row])


def _counter(size: int) -> IntArray:
    return np.zeros(size, np.int32)


def _flag(size: int) -> BoolArray:
    return np.zeros(size, np.bool_)
