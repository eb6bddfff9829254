"""The running set as arrays indexed by row. Keeps the counters and their order; decides nothing."""

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from ..kvcache.manager import BlockTable
from .in_flight import InFlightSteps
from .plan import IntArray
from .sequence import Sequence

BoolArray = NDArray[np.bool_]

_UNLIMITED = 1 << 30


class RowTable:
    """`size` rows over blocks of `block_size` tokens; a sequence keeps its row from admission until it ended or was
    preempted and nothing of it is in flight. Then row and blocks are free together, so a row in a late result always
    means whom it meant when planned.

    The positions of one sequence, cut by its counters:

        0 ........ committed ........ computed ........ scheduled ........ known ........ known + pending .. limit
        | findable  | in its blocks    | being computed  | to be scheduled  | sampled, seen    | not yet
        | by others | for itself only  | by plans in     | next             | by the device    | there
        |           |                  | flight          |                  | only             |

    `committed <= computed <= scheduled <= expected`, which is known + pending, and `computed < known`: computing the
    newest token is what samples its successor. (Until plans in flight are back, `scheduled` of an ended or held row
    counts on tokens that will not come.)

    `behind`: running rows that were not sampled in this stay: prompts half computed; all others decode. `held`: a
    result was not what later plans built on; they are not scheduled until those are back. `leaving`: their sequence
    ended or was preempted; plans in flight still have them. Each is empty in most steps, which then touch none of it.
    Nor do they look whose last token came: `spare`, or more, are still to come to every running row.
    """

    def __init__(self, size: int, block_size: int) -> None:
        self.size = size
        self.block_size = block_size
        self.known = _counter(size)
        self.expected = _counter(size)  # known, and tokens that plans in flight are to bring
        self.scheduled = _counter(size)
        self.computed = _counter(size)
        self.next_commit_at = np.full(
            size, block_size, np.int32
        )  # computed tokens at which its next block can be committed
        self.token_limit = _counter(size)
        self.decode_limit = _counter(
            size
        )  # what it may be scheduled up to as a decoding row; 0 while it is none, or held
        self.capacity = _counter(size)  # tokens its blocks hold
        self.reserved_tokens = _counter(size)  # tokens its admission counted on
        self.tenant_slot = _counter(size)  # its tenant's number
        self.running = _flag(size)  # occupied, and not about to leave
        self.ended = _flag(size)  # about to leave for good: takes no further token
        self.long_prompt = _flag(size)  # its prompt goes in the lane of long ones
        self.seniority = np.zeros(size, np.int64)
        self.arrival_number = np.zeros(size, np.int64)
        self.announced_blocks = [0] * size  # blocks the executor has been told of
        self.keys = [0] * size
        self.stops: list[frozenset[int]] = [frozenset()] * size
        self.outputs: list[list[int]] = [[] for _ in range(size)]  # each is its sequence's own list
        self.sequences: dict[int, Sequence] = {}
        self.tables: dict[int, BlockTable] = {}
        self.in_flight = InFlightSteps()
        self.prefilling: set[int] = set()
        self.awaiting_results: set[int] = set()
        self.releasing: set[int] = set()
        self.min_remaining = _UNLIMITED
        self._free = list(range(size))  # a heap

    @property
    def num_free(self) -> int:
        """Rows without a sequence."""
        return len(self._free)

    @property
    def num_running(self) -> int:
        """Running rows."""
        return len(self.sequences) - len(self.releasing)

    def decode_gaps(self) -> IntArray:
        """[size] tokens that each decoding row could compute now. The last token of all is never computed: nothing
        follows it."""
        ends: IntArray = np.maximum(np.minimum(self.expected, self.decode_limit), self.scheduled)
        return ends - self.scheduled

    # Life of a row

    def occupy(self, sequence: Sequence, table: BlockTable, reserve: int) -> int:
        """Give the sequence a row, everything its table shares being computed."""
        row = heappop(self._free)
        self.sequences[row], self.tables[row] = sequence, table
        self.keys[row], self.stops[row] = sequence.key, sequence.request.stop_token_ids
        self.outputs[row] = sequence.outputs
        self.known[row] = self.expected[row] = sequence.known
        self.token_limit[row], self.decode_limit[row] = sequence.token_limit, 0
        self.scheduled[row] = self.computed[row] = self.capacity[row] = table.cached
        self.next_commit_at[row] = table.cached + self.block_size
        self.reserved_tokens[row], self.tenant_slot[row], self.announced_blocks[row] = reserve, sequence.tenant_slot, 0
        self.seniority[row], self.arrival_number[row] = sequence.seniority, sequence.arrival_number
        self.running[row] = True
        self.ended[row] = self.long_prompt[row] = False
        self.prefilling.add(row)
        self.min_remaining = min(self.min_remaining, sequence.token_limit - sequence.known)
        sequence.row = row
        return row

    def consume_remaining(self, tokens: int) -> bool:
        """At most so many tokens come to each row. Whether one of them may be somebody's last."""
        self.min_remaining -= tokens
        return self.min_remaining <= 0

    def measure_min_remaining(self) -> None:
        """Of those whose last token came there is nothing to come."""
        room = (self.token_limit - self.known)[self.running]
        self.min_remaining = int(room[room > 0].min(initial=_UNLIMITED))

    def start_decoding(self, row: int) -> None:
        """It is sampled for the first time: from here on it decodes."""
        self.prefilling.remove(row)
        self.decode_limit[row] = self.token_limit[row] - 1

    def await_results(self, row: int) -> None:
        self.awaiting_results.add(row)
        self.decode_limit[row] = 0

    def resume_settled(self) -> None:
        """Those whose plans are all back continue from what is computed."""
        for row in [row for row in self.awaiting_results if not self.in_flight.includes_row(row)]:
            self.awaiting_results.remove(row)
            self.scheduled[row] = self.computed[row]
            self.decode_limit[row] = self.token_limit[row] - 1 if self.running[row] else 0

    def stop_running(self, row: int) -> None:
        """It runs no more."""
        self.running[row] = False
        self.decode_limit[row] = 0
        self.prefilling.discard(row)
        self.releasing.add(row)

    def vacate(self, row: int) -> tuple[Sequence, BlockTable]:
        """Free a row that left and that no plan has; its table is the caller's to close."""
        assert not self.in_flight.includes_row(row)
        self.releasing.remove(row)
        self.awaiting_results.discard(row)
        heappush(self._free, row)
        sequence = self.sequences.pop(row)
        sequence.row = None
        return sequence, self.tables.pop(row)

    def by_seniority(self, rows: IntArray | NDArray[np.int64]) -> list[int]:
        """The rows, the most senior first."""
        if not len(rows):
            return []
        ordered: list[int] = rows[np.lexsort((self.arrival_number[rows], self.seniority[rows]))].tolist()
        return ordered

    def preemption_victim(self) -> int:
        """The youngest running row of the lowest class."""
        return self.by_seniority(np.flatnonzero(self.running))[-1]

    def reserved_blocks(self) -> int:
        """Blocks that running rows were promised at admission and have not taken yet."""
        lacking = np.maximum(self.reserved_tokens - self.capacity, 0)[self.running]
        return int((-(-lacking // self.block_size)).sum())

    def check_integrity(self) -> None:
        """Recompute what can be.

        Raises:
            AssertionError: counters out of order, or rows and sequences apart.
        """
        occupied = sorted(self.sequences)
        assert sorted(self._free + occupied) == list(range(self.size))
        assert self.tables.keys() == self.sequences.keys()
        assert sorted([*np.flatnonzero(self.running).tolist(), *self.releasing]) == occupied
        assert self.prefilling <= self.sequences.keys() - self.releasing - self.awaiting_results
        in_flight, pending = self.in_flight.steps_per_row(self.size), _counter(self.size)
        for flight in self.in_flight:
            pending[flight.sampled_rows] += 1
        assert set(np.flatnonzero(in_flight).tolist()) <= set(occupied), "a plan has a row that nobody has"
        for row in occupied:
            self._check_counters(row, int(pending[row]))
            self._check_blocks(row)
            self._check_flags(row, int(in_flight[row]))

    def _check_counters(self, row: int, pending: int) -> None:
        known, expected, scheduled = int(self.known[row]), int(self.expected[row]), int(self.scheduled[row])
        limit = self.sequences[row].token_limit
        assert 0 <= self.next_commit_at[row] - self.block_size <= self.computed[row] <= scheduled
        assert self.min_remaining <= limit - known or not self.running[row], "somebody could end unseen"
        assert self.computed[row] < known <= limit == self.token_limit[row]
        assert known == self.sequences[row].known
        assert expected == known + pending or self.ended[row]
        assert scheduled <= expected or self.ended[row] or row in self.awaiting_results
        assert row not in self.prefilling or scheduled < known == expected
        decodes = self.running[row] and row not in self.awaiting_results | self.prefilling
        assert self.decode_limit[row] == (limit - 1 if decodes else 0)

    def _check_blocks(self, row: int) -> None:
        table = self.tables[row]
        assert self.scheduled[row] <= self.capacity[row] == len(table.blocks) * self.block_size
        assert self.next_commit_at[row] == (table.committed + 1) * self.block_size

    def _check_flags(self, row: int, in_flight: int) -> None:
        assert self.sequences[row].row == row
        assert self.running[row] or in_flight, "a row that left stays occupied"
        assert in_flight or row not in self.awaiting_results
        assert not (self.running[row] and self.ended[row])


def _counter(size: int) -> IntArray:
    return np.zeros(size, np.int32)


def _flag(size: int) -> BoolArray:
    return np.zeros(size, np.bool_)
