"""The sequences that hold a row, as arrays indexed by row, and the steps in flight. Keeps counters; decides nothing."""

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.metrics import EngineTotals
from ..kvcache.block_table import BlockTable
from ..kvcache.manager import KVCacheManager
from .adapters.adapter_room import AdapterRoom
from .config import SchedulerConfig
from .constraints.constrained_rows import ConstrainedRows
from .encoders.encoder_rows import spans_from
from .plan import IntArray, LongArray, NewSequence, StepWork
from .sequence import Sequence
from .states.kept_states import FORKS_LOOKED_AT, KeptStates
from .states.state_saves import StateSave
from .waiting_queue import WaitingQueue

BoolArray = NDArray[np.bool_]

UNLIMITED = 1 << 30


class InFlightStep(NamedTuple):
    """A plan of R rows without a result."""

    step: int
    rows: LongArray
    """[R]"""
    scheduled_ends: IntArray
    """[R] tokens of each row that are scheduled after it."""
    sampled_rows: list[int]
    """Rows that are to bring a token, in the plan's order; one with drafts occurs once for each of them too."""
    work: StepWork
    drafts: Mapping[int, int] = {}
    """The number of drafts, by row."""
    saves: tuple[StateSave, ...] = ()
    """The states that it keeps for later prompts."""


class RunningSet:
    """Rows over the blocks of `cache`. A sequence keeps its row from admission until it has ended or was
    preempted, and no plan in flight has it. Then its row and blocks are freed together: a row in a late result means
    the sequence of its plan. A preempted sequence goes back into the `waiting` queue.

    The positions of one sequence, cut by its counters:

        0 ........ committed ........ computed ........ scheduled ........ known ........ known + pending .. token_limit
        | findable  | in its blocks    | being computed  | to be scheduled  | sampled, seen    | not yet
        | by others | for itself only  | by plans in     | next             | by the device    | there
        |           |                  | flight          |                  | only             |

    `committed <= computed <= scheduled <= expected`, which is known + pending, and `computed < known`: computing the
    newest token is what samples its successor. (Until plans in flight are back, `scheduled` of an ended or awaiting
    row counts on tokens that will not come.)
    """

    def __init__(self, config: SchedulerConfig, cache: KVCacheManager, waiting: WaitingQueue) -> None:
        size = self.size = config.max_num_seqs
        self.cache = cache
        self.waiting = waiting
        self.most_in_flight = config.max_in_flight
        """Plans in flight that may have the same row, if it is not constrained."""
        self.states = None if cache.draft_states is None else KeptStates(size, cache, config.snapshots)
        """None: sequences have no recurrent states."""
        self.adapters = AdapterRoom(config.max_loras, waiting) if config.max_loras else None
        """None: all adapters may run at once."""
        # By row.
        self.known = _counter(size)
        self.expected = _counter(size)  # known, and tokens that plans in flight are to bring
        self.scheduled = _counter(size)
        self.computed = _counter(size)
        self.next_commit_at = np.full(size, cache.block_size, np.int32)  # computed tokens that fill its next block
        self.token_limit = _counter(size)
        self.decode_limit = _counter(size)  # tokens it may have scheduled as a decoding row; 0: none, or awaits results
        self.capacity = _counter(size)  # tokens its blocks hold
        self.slid = _counter(size)  # spans whose tokens no sliding layer sees any more
        self.next_slide_at = np.full(size, UNLIMITED, np.int32)  # computed tokens after which there is another one
        self.reserved_tokens = _counter(size)  # tokens its admission counted on
        self.max_in_flight = _counter(size)  # plans in flight that may have the row: one, if it is constrained
        self.drafts_from = np.full(size, UNLIMITED, np.int32)  # tokens known when it may have drafts, if it ever may
        self.running = np.zeros(size, np.bool_)  # holds a sequence, and is not releasing
        self.ended = np.zeros(size, np.bool_)  # releasing for good: takes no further token
        self.keys = [0] * size
        self.ages = [(0, 0)] * size  # (seniority, arrival number), the lowest the most senior
        self.stops: list[frozenset[int]] = [frozenset()] * size
        self.outputs: list[list[int]] = [[] for _ in range(size)]  # each is its sequence's own list
        self.sequences: dict[int, Sequence] = {}
        self.tables: dict[int, BlockTable] = {}
        self.promising: dict[bytes, set[int]] = {}
        """Rows that have yet to compute blocks of their prompts, by the hash of the first that they did not find."""
        # Rows of one kind. Each is empty in most steps, which then touch none of it.
        self.prefilling = set[int]()  # running, and not sampled in this stay; all other running rows decode
        self.awaiting_results = set[int]()  # a result was not what later plans built on: waits until they are back
        self.releasing = set[int]()  # the sequence ended or was preempted; plans in flight still have it
        self.scoring = set[int]()  # wants log-probabilities of its prompt
        self.drafting = set[int]()  # may have drafts
        self.constrained = ConstrainedRows()  # the next token depends on what the host makes of the last
        self.itl_targets: dict[int, float] = {}  # seconds between tokens, of rows that want some
        # Of all rows.
        self.in_flight: deque[InFlightStep] = deque()
        self.min_remaining = UNLIMITED
        """At least so many tokens are still to come to every running row; while that is more than a result brings, no
        row is looked at for its last token."""
        self.blocked: tuple[Sequence | None, int] = None, 0
        """The sequence that was last found not to fit, and the blocks that were to be had then."""
        self._free = list(range(size))  # a heap
        self.closed_rows: list[int] = []  # freed since the last plan
        self.appended: list[tuple[int, int]] = []
        """(row, block) pairs of running rows that no plan has had yet."""
        self.started: list[tuple[int, int]] = []
        """(key, prompt tokens found in the prefix cache) of sequences first admitted since the last updates."""
        self.totals = EngineTotals()

    @property
    def num_free(self) -> int:
        """Rows without a sequence."""
        return len(self._free)

    @property
    def num_running(self) -> int:
        return len(self.sequences) - len(self.releasing)

    @property
    def decodes_text(self) -> bool:
        """Whether a row decodes behind a prompt of text alone."""
        decoding = self.sequences.keys() - self.prefilling - self.releasing
        return any(not self.sequences[row].spec.embedded for row in decoding)

    def by_seniority(self, rows: IntArray | LongArray) -> list[int]:
        """The rows, the most senior first."""
        return sorted(rows.tolist(), key=self.ages.__getitem__)

    def reserved_blocks(self) -> int:
        """Blocks that running rows were promised at admission and have not taken yet."""
        size = self.cache.block_size
        lacking = -(-np.maximum(self.reserved_tokens - self.capacity, 0)[self.running] // size)
        if self.cache.sliding is None:
            return int(lacking.sum()) * self.cache.span_blocks
        return self.cache.sliding.demand.all_to_come(lacking, (self.capacity // size - self.slid)[self.running])

    def spare_blocks(self, no_evict: bool) -> int:
        """Blocks that a new sequence must leave: those promised to others, and optimistically one of each group for
        each of them to grow."""
        reserved = self.reserved_blocks()
        return reserved if no_evict else reserved + self.num_running * self.cache.span_blocks

    # The life of a row

    def admit(self, sequence: Sequence, table: BlockTable, reserved_tokens: int) -> int:
        """Take the sequence out of the waiting queue and give it a row; what its table shares is computed."""
        self.waiting.pop(sequence)
        row = sequence.row = heappop(self._free)
        spec, cached = sequence.spec, table.cached
        self.sequences[row], self.tables[row] = sequence, table
        self.appended.extend((row, block) for block in table.blocks)
        self.keys[row] = spec.key
        self.stops[row] = spec.stop_token_ids
        self.outputs[row] = sequence.outputs
        self.ages[row] = sequence.seniority, sequence.arrival_number
        self.known[row] = self.expected[row] = sequence.known
        self.token_limit[row], self.decode_limit[row] = sequence.token_limit, 0
        self.scheduled[row] = self.computed[row] = self.capacity[row] = cached
        self.next_commit_at[row] = cached + self.cache.block_size
        self.reserved_tokens[row] = reserved_tokens
        self._note_slid(row)
        if _promises(table):
            self.promising.setdefault(self._first_promised(table), set()).add(row)
        if self.states is not None:
            self.states.enter(row, sequence, table, self.waiting.first(FORKS_LOOKED_AT))
        self.max_in_flight[row] = 1 if spec.constrained else self.most_in_flight
        self.running[row], self.ended[row] = True, False
        self.prefilling.add(row)
        if sequence.lacks_prompt_logprobs:
            self.scoring.add(row)
        if sequence.drafts is not None:
            self.drafting.add(row)
            self.drafts_from[row] = sequence.drafts.resume_at
        if spec.constrained:
            self.constrained.keys[row] = spec.key
        if self.adapters is not None:
            self.adapters.enter(sequence)
        if sequence.target_itl is not None:
            self.itl_targets[row] = sequence.target_itl
        self.min_remaining = min(self.min_remaining, sequence.token_limit - sequence.known)
        if not sequence.admitted:
            sequence.admitted = True
            looks_up = self.cache.prefix_caching and not sequence.lacks_prompt_logprobs
            self.totals.prefix_queries += len(spec.prompt) if looks_up else 0
            self.totals.prefix_hits += cached
            self.totals.restored += table.restored
            self.totals.landed += table.landed
            self.totals.state_misses += table.forked - cached
            self.started.append((spec.key, cached))
        else:
            self.totals.recomputed_tokens += max(sequence.preempted_at - cached, 0)
        return row

    def new_sequence(self, row: int) -> NewSequence:
        """The row's sequence as an executor gets it when it enters."""
        sequence = self.sequences[row]
        spec, sampling = sequence.spec, sequence.spec.sampling
        if not sequence.lacks_prompt_logprobs:
            sampling = sampling._replace(prompt_logprobs=None)
        known = np.concatenate([spec.prompt, np.array(sequence.outputs, np.int32)])
        computed, snapshot = int(self.scheduled[row]), self.tables[row].snapshot
        embedded, shift = spans_from(spec.embedded, computed) if spec.embedded else ((), 0)
        parts = spec.adapter, snapshot, embedded, shift, spec.encoded
        return NewSequence(row, known, computed, sampling, len(spec.prompt), *parts)

    def _first_promised(self, table: BlockTable) -> bytes:
        return table.promised[table.cached // self.cache.block_size]

    def end_promises(self, row: int) -> None:
        """The row has computed all blocks that it promised, or gives up those that are left."""
        first = self._first_promised(self.tables[row])
        self.promising[first].remove(row)
        if not self.promising[first]:
            del self.promising[first]

    def promisers(self, hashes: Iterable[bytes]) -> Iterator[int]:
        """The rows with blocks yet to compute that began within these first blocks of a prompt: whoever is to compute
        one of them is among those."""
        for first in filter(self.promising.__contains__, hashes):
            yield from self.promising[first]

    def extend(self, row: int, end: int) -> bool:
        """Let the row's table hold `end` tokens, if so many blocks are free."""
        table = self.tables[row]
        before = len(table.blocks)
        if not self.cache.extend(table, end):
            return False
        self.capacity[row] = self.cache.spans_of(table) * self.cache.block_size
        self.appended.extend((row, block) for block in table.blocks[before:])
        return True

    def slide(self) -> None:
        """Give up blocks that are behind the window of all tokens to come."""
        if self.cache.sliding is None:
            return
        for row in (self.computed >= self.next_slide_at).nonzero()[0].tolist():
            self.cache.sliding.slide(self.tables[row], int(self.computed[row]))
            self._note_slid(row)

    def _note_slid(self, row: int) -> None:
        slid, groups = self.tables[row].slid, self.cache.groups
        self.slid[row] = slid
        if groups.sliding:
            self.next_slide_at[row] = (slid + 1) * self.cache.block_size + groups.window - 1

    def remove(self, row: int) -> None:
        """End a row's stay: it is released at once, or when the last plan in flight that has it is applied."""
        self.running[row] = False
        self.decode_limit[row] = 0
        self.next_slide_at[row] = UNLIMITED
        self.prefilling.discard(row)
        self.releasing.add(row)
        if self.appended:
            self.appended = [pair for pair in self.appended if pair[0] != row]
        if self.sequences[row].spec.constrained:
            self.constrained.stop(row)
        self.release_settled((row,))

    def release_settled(self, rows: Iterable[int] | None = None) -> None:
        """Free releasing rows that no plan in flight has, with their blocks; preempted sequences wait again."""
        for row in sorted(self.releasing) if rows is None else rows:
            if self.is_in_flight(row):
                continue
            self.releasing.remove(row)
            self.awaiting_results.discard(row)
            self.scoring.discard(row)
            self.drafting.discard(row)
            self.drafts_from[row] = UNLIMITED
            self.constrained.keys.pop(row, None)
            self.itl_targets.pop(row, None)
            if self.states is not None:
                self.states.leave(row)
            heappush(self._free, row)
            self.closed_rows.append(row)
            if _promises(self.tables[row]):
                self.end_promises(row)
            sequence, table = self.sequences.pop(row), self.tables.pop(row)
            sequence.row, sequence.preempted_at = None, int(self.computed[row])
            if self.adapters is not None:
                self.adapters.leave(sequence)
            sequence.close_table(table, self.cache)
            self.waiting.wake(table.promised[table.committed :])
            if not self.ended[row]:
                sequence.rank = sequence.seniority  # most of it is still cached
                self.waiting.enqueue_preempted(sequence)

    def await_results(self, rows: Iterable[int]) -> None:
        """Schedule these rows no more until their plans are back; those whose plans are back by now continue from what
        is computed."""
        self.awaiting_results.update(rows)
        for row in list(self.awaiting_results):
            self.decode_limit[row] = 0
            if not self.is_in_flight(row):
                self.awaiting_results.remove(row)
                self.scheduled[row] = self.computed[row]
                self.decode_limit[row] = self.token_limit[row] - 1 if self.running[row] else 0

    # Steps in flight

    def is_in_flight(self, row: int) -> bool:
        return any((flight.rows == row).any() for flight in self.in_flight)

    def steps_in_flight(self) -> IntArray:
        """[size] plans in flight that have each row."""
        counts = _counter(self.size)
        for flight in self.in_flight:
            counts[flight.rows] += 1
        return counts

    def full_rows(self) -> BoolArray | None:
        """[size] whether a row is in as many plans in flight as it may be in; None where none can be."""
        if not self.in_flight:
            return None
        if len(self.in_flight) < self.most_in_flight and not (self.constrained.keys or self.drafting):
            return None
        steps = self.steps_in_flight()
        full: BoolArray = steps >= self.max_in_flight
        if self.drafting:  # their next drafts follow their last token
            full |= (steps > 0) & (self.known >= self.drafts_from)
        return full

    def check_integrity(self) -> None:
        """Raises `AssertionError` where counters are out of order, or rows and sequences do not match."""
        occupied = sorted(self.sequences)
        assert sorted(self._free + occupied) == list(range(self.size))
        assert self.tables.keys() == self.sequences.keys()
        assert sorted([*np.flatnonzero(self.running).tolist(), *self.releasing]) == occupied
        assert self.prefilling <= self.sequences.keys() - self.releasing - self.awaiting_results
        constrained = {row: self.keys[row] for row in occupied if self.sequences[row].spec.constrained}
        self.constrained.check_integrity(constrained, self.running)
        if self.adapters is not None:
            self.adapters.check_integrity(self.sequences.values())
        promising = [(self._first_promised(table), row) for row, table in self.tables.items() if _promises(table)]
        assert sorted(promising) == sorted((first, row) for first, rows in self.promising.items() for row in rows)
        assert self.drafting == {row for row in occupied if self.sequences[row].drafts}
        assert self.drafting == set(np.flatnonzero(self.drafts_from < UNLIMITED).tolist())
        assert self.itl_targets.keys() <= self.sequences.keys()
        assert all(self.running[row] for row, _ in self.appended), "a row that left gets blocks"
        if self.states is not None:
            saves = [save for flight in self.in_flight for save in flight.saves]
            drafts = {row: number for flight in self.in_flight for row, number in flight.drafts.items()}
            self.states.check_integrity(saves, drafts, occupied, self.scheduled, self.ended)
        in_flight, pending = self.steps_in_flight(), _counter(self.size)
        for flight in self.in_flight:
            np.add.at(pending, flight.sampled_rows, 1)
        assert set(np.flatnonzero(in_flight).tolist()) <= set(occupied), "a plan has a row without a sequence"
        for row in occupied:
            self._check_counters(row, int(pending[row]))
            assert self.sequences[row].row == row
            assert self.running[row] or in_flight[row], "a row stays occupied after its sequence left"
            assert in_flight[row] or row not in self.awaiting_results
            assert not (self.running[row] and self.ended[row])

    def _check_counters(self, row: int, pending: int) -> None:
        known = int(self.known[row])
        expected = int(self.expected[row])
        scheduled = int(self.scheduled[row])
        limit = self.sequences[row].token_limit
        table = self.tables[row]
        size = self.cache.block_size
        assert 0 <= self.next_commit_at[row] - size <= self.computed[row] <= scheduled
        assert self.min_remaining <= limit - known or not self.running[row], "a row could end unseen"
        assert self.computed[row] < known <= limit == self.token_limit[row]
        assert known == self.sequences[row].known
        assert expected == known + pending or self.ended[row]
        assert scheduled <= expected or self.ended[row] or row in self.awaiting_results
        assert row not in self.prefilling or scheduled < known == expected
        decodes = self.running[row] and row not in self.awaiting_results | self.prefilling
        assert self.decode_limit[row] == (limit - 1 if decodes else 0)
        assert scheduled <= self.capacity[row] == self.cache.spans_of(table) * size
        assert self.slid[row] == table.slid
        assert self.computed[row] < self.next_slide_at[row]
        assert self.next_commit_at[row] == (table.committed + 1) * size


def _promises(table: BlockTable) -> bool:
    return table.committed < len(table.promised)


def _counter(size: int) -> IntArray:
    return np.zeros(size, np.int32)
