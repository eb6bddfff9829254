"""The sequences that hold a row, as arrays indexed by row, and the steps in flight. Keeps counters; decides nothing."""

from collections import deque
from collections.abc import Iterable
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..kvcache.manager import BlockTable, KVCacheManager
from .plan import IntArray, LongArray
from .prefill_budget import StepWork
from .sequence import Sequence
from .waiting_queue import WaitingQueue

BoolArray = NDArray[np.bool_]

_UNLIMITED = 1 << 30


class InFlightStep(NamedTuple):
    """A plan without a result. `scheduled_ends` [R]: tokens of each of its `rows` [R] that are scheduled after it.
    `sampled_rows`: rows that are to bring a token, in the plan's order. `work`: what it computes."""

    step: int
    rows: LongArray
    scheduled_ends: IntArray
    sampled_rows: list[int]
    work: StepWork


class RunningSet:
    """`size` rows over the blocks of `cache`; a sequence keeps its row from admission until it ended or was preempted
    and nothing of it is in flight. Then row and blocks are freed together, so that a row in a late result always means
    the sequence it meant when it was planned. A preempted sequence goes back into the `waiting` queue.

    The positions of one sequence, cut by its counters:

        0 ........ committed ........ computed ........ scheduled ........ known ........ known + pending .. token_limit
        | findable  | in its blocks    | being computed  | to be scheduled  | sampled, seen    | not yet
        | by others | for itself only  | by plans in     | next             | by the device    | there
        |           |                  | flight          |                  | only             |

    `committed <= computed <= scheduled <= expected`, which is known + pending, and `computed < known`: computing the
    newest token is what samples its successor. (Until plans in flight are back, `scheduled` of an ended or awaiting
    row counts on tokens that will not come.)

    `prefilling`: running rows that were not sampled in this stay; all other running rows decode. `awaiting_results`: a
    result was not what later plans built on; these rows are not scheduled until those plans are back. `releasing`: the
    sequence ended or was preempted; plans in flight still have it. `capped`: rows with a lower `max_in_flight` than the
    others. `scoring`: rows that want log-probabilities of their prompts. Each set is empty in most steps, which then
    touch none of it. Nor do they look for rows whose last token came while at least `min_remaining` tokens are still to
    come to every running row.

    `closed_rows`: rows freed since the last plan. `started`: (key, prompt tokens found in the prefix cache) of
    sequences first admitted since the last updates. `preemptions`, `prefix_queries` and `prefix_hits`: sequences
    preempted, prompt tokens looked up in the prefix cache, and found there.
    """

    def __init__(self, size: int, cache: KVCacheManager, waiting: WaitingQueue, max_in_flight: int) -> None:
        self.size, self.cache, self.waiting = size, cache, waiting
        self._most_in_flight = max_in_flight
        self.known = _counter(size)
        self.expected = _counter(size)  # known, and tokens that plans in flight are to bring
        self.scheduled = _counter(size)
        self.computed = _counter(size)
        self.next_commit_at = np.full(size, cache.block_size, np.int32)  # computed tokens that fill the next block
        self.token_limit = _counter(size)
        self.decode_limit = _counter(size)  # tokens it may have scheduled as a decoding row; 0: none, or awaits results
        self.capacity = _counter(size)  # tokens its blocks hold
        self.reserved_tokens = _counter(size)  # tokens its admission counted on
        self.max_in_flight = _counter(size)  # plans in flight that may have the row
        self.tenant_slot = _counter(size)
        self.running = _flag(size)  # holds a sequence, and is not releasing
        self.ended = _flag(size)  # releasing for good: takes no further token
        self.long_prompt = _flag(size)
        self.seniority = np.zeros(size, np.int64)
        self.arrival_number = np.zeros(size, np.int64)
        self.announced_blocks = [0] * size  # blocks the executor has been told of
        self.keys = [0] * size
        self.stops: list[frozenset[int]] = [frozenset()] * size
        self.outputs: list[list[int]] = [[] for _ in range(size)]  # each is its sequence's own list
        self.sequences: dict[int, Sequence] = {}
        self.tables: dict[int, BlockTable] = {}
        self.in_flight: deque[InFlightStep] = deque()
        self.prefilling, self.awaiting_results, self.releasing = (set[int]() for _ in range(3))
        self.capped, self.scoring = set[int](), set[int]()
        self.min_remaining = _UNLIMITED
        self._free = list(range(size))  # a heap
        self.closed_rows: list[int] = []
        self.started: list[tuple[int, int]] = []
        self.preemptions = self.prefix_queries = self.prefix_hits = 0

    @property
    def num_free(self) -> int:
        """Rows without a sequence."""
        return len(self._free)

    @property
    def num_running(self) -> int:
        return len(self.sequences) - len(self.releasing)

    def by_seniority(self, rows: IntArray | LongArray) -> list[int]:
        """The rows, the most senior first."""
        if not len(rows):
            return []
        ordered: list[int] = rows[np.lexsort((self.arrival_number[rows], self.seniority[rows]))].tolist()
        return ordered

    def reserved_blocks(self) -> int:
        """Blocks that running rows were promised at admission and have not taken yet."""
        lacking = np.maximum(self.reserved_tokens - self.capacity, 0)[self.running]
        return int((-(-lacking // self.cache.block_size)).sum())

    # The life of a row

    def admit(self, sequence: Sequence, table: BlockTable, reserved_tokens: int) -> int:
        """Take the sequence out of the waiting queue and give it a row; what its table shares is computed."""
        self.waiting.pop(sequence)
        row = sequence.row = heappop(self._free)
        self.sequences[row], self.tables[row] = sequence, table
        self.keys[row], self.stops[row] = sequence.key, sequence.request.stop_token_ids
        self.outputs[row] = sequence.outputs
        self.known[row] = self.expected[row] = sequence.known
        self.token_limit[row], self.decode_limit[row] = sequence.token_limit, 0
        self.scheduled[row] = self.computed[row] = self.capacity[row] = table.cached
        self.next_commit_at[row] = table.cached + self.cache.block_size
        self.reserved_tokens[row], self.tenant_slot[row] = reserved_tokens, sequence.tenant_slot
        self.announced_blocks[row] = 0
        self.max_in_flight[row] = min(sequence.request.max_in_flight or self._most_in_flight, self._most_in_flight)
        self.seniority[row], self.arrival_number[row] = sequence.seniority, sequence.arrival_number
        self.running[row] = True
        self.ended[row] = self.long_prompt[row] = False
        self.prefilling.add(row)
        if self.max_in_flight[row] < self._most_in_flight:
            self.capped.add(row)
        if sequence.lacks_prompt_logprobs:
            self.scoring.add(row)
        self.min_remaining = min(self.min_remaining, sequence.token_limit - sequence.known)
        if not sequence.admitted:
            sequence.admitted = True
            looks_up = self.cache.prefix_caching and not sequence.lacks_prompt_logprobs
            self.prefix_queries += len(sequence.request.prompt) if looks_up else 0
            self.prefix_hits += table.cached
            self.started.append((sequence.key, table.cached))
        return row

    def preemption_victim(self) -> int:
        """The youngest running row of the lowest class."""
        return self.by_seniority(np.flatnonzero(self.running))[-1]

    def preempt(self, row: int) -> None:
        """Let the row's sequence make way for others; it waits again as soon as nothing of it is in flight."""
        self.preemptions += 1
        self.remove(row)

    def remove(self, row: int) -> None:
        """End a row's stay: it is released at once, or when the last plan in flight that has it is applied."""
        self.running[row] = False
        self.decode_limit[row] = 0
        self.prefilling.discard(row)
        self.releasing.add(row)
        self.release_settled((row,))

    def release_settled(self, rows: Iterable[int] | None = None) -> None:
        """Free releasing rows that no plan in flight has, with their blocks; preempted sequences wait again."""
        for row in sorted(self.releasing) if rows is None else rows:
            if self.is_in_flight(row):
                continue
            self.releasing.remove(row)
            self.awaiting_results.discard(row)
            self.capped.discard(row)
            self.scoring.discard(row)
            heappush(self._free, row)
            self.closed_rows.append(row)
            sequence, table = self.sequences.pop(row), self.tables.pop(row)
            sequence.row = None
            self.cache.close(table)
            self.waiting.wake_waiting_for(table.promised[table.committed :])
            if not self.ended[row]:
                sequence.rank = sequence.seniority  # most of it is still cached
                self.waiting.enqueue(sequence)

    # Decoding rows

    def decode_gaps(self) -> IntArray:
        """[size] tokens that each decoding row could compute now. The last token of all is never computed: nothing
        follows it."""
        ends: IntArray = np.maximum(np.minimum(self.expected, self.decode_limit), self.scheduled)
        return ends - self.scheduled

    def start_decoding(self, row: int) -> None:
        """The row is sampled for the first time: from here on it decodes."""
        self.prefilling.remove(row)
        self.decode_limit[row] = self.token_limit[row] - 1

    def await_results(self, row: int) -> None:
        """Schedule the row no more until `resume_settled` finds its plans back."""
        self.awaiting_results.add(row)
        self.decode_limit[row] = 0

    def resume_settled(self) -> None:
        """Rows that awaited results and whose plans are all back continue from what is computed."""
        for row in [row for row in self.awaiting_results if not self.is_in_flight(row)]:
            self.awaiting_results.remove(row)
            self.scheduled[row] = self.computed[row]
            self.decode_limit[row] = self.token_limit[row] - 1 if self.running[row] else 0

    def measure_min_remaining(self) -> None:
        """Recompute `min_remaining`, leaving out rows whose last token came."""
        room = (self.token_limit - self.known)[self.running]
        self.min_remaining = int(room[room > 0].min(initial=_UNLIMITED))

    # Steps in flight

    def is_in_flight(self, row: int) -> bool:
        """Whether a plan in flight has the row."""
        return any((flight.rows == row).any() for flight in self.in_flight)

    def steps_in_flight(self) -> IntArray:
        """[size] plans in flight that have each row."""
        counts = _counter(self.size)
        for flight in self.in_flight:
            counts[flight.rows] += 1
        return counts

    def check_integrity(self) -> None:
        """Recompute what can be recomputed.

        Raises:
            AssertionError: counters are out of order, or rows and sequences do not match.
        """
        occupied = sorted(self.sequences)
        assert sorted(self._free + occupied) == list(range(self.size))
        assert self.tables.keys() == self.sequences.keys()
        assert sorted([*np.flatnonzero(self.running).tolist(), *self.releasing]) == occupied
        assert self.prefilling <= self.sequences.keys() - self.releasing - self.awaiting_results
        assert self.capped == {row for row in occupied if self.max_in_flight[row] < self._most_in_flight}
        in_flight, pending = self.steps_in_flight(), _counter(self.size)
        for flight in self.in_flight:
            pending[flight.sampled_rows] += 1
        assert set(np.flatnonzero(in_flight).tolist()) <= set(occupied), "a plan has a row without a sequence"
        for row in occupied:
            self._check_counters(row, int(pending[row]))
            assert self.sequences[row].row == row
            assert self.running[row] or in_flight[row], "a row stays occupied after its sequence left"
            assert in_flight[row] or row not in self.awaiting_results
            assert not (self.running[row] and self.ended[row])

    def _check_counters(self, row: int, pending: int) -> None:
        known, expected, scheduled = int(self.known[row]), int(self.expected[row]), int(self.scheduled[row])
        limit, table, size = self.sequences[row].token_limit, self.tables[row], self.cache.block_size
        assert 0 <= self.next_commit_at[row] - size <= self.computed[row] <= scheduled
        assert self.min_remaining <= limit - known or not self.running[row], "a row could end unseen"
        assert self.computed[row] < known <= limit == self.token_limit[row]
        assert known == self.sequences[row].known
        assert expected == known + pending or self.ended[row]
        assert scheduled <= expected or self.ended[row] or row in self.awaiting_results
        assert row not in self.prefilling or scheduled < known == expected
        decodes = self.running[row] and row not in self.awaiting_results | self.prefilling
        assert self.decode_limit[row] == (limit - 1 if decodes else 0)
        assert scheduled <= self.capacity[row] == len(table.blocks) * size
        assert self.next_commit_at[row] == (table.committed + 1) * size


def _counter(size: int) -> IntArray:
    return np.zeros(size, np.int32)


def _flag(size: int) -> BoolArray:
    return np.zeros(size, np.bool_)
