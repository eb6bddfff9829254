"""One step's content: decoding rows first, then chunks of prompts, and blocks for all of them.

Half-computed and waiting prompts are treated alike. Short ones go first, and long ones have a part of the step that
short ones cannot take: neither is stuck behind the other. Knows no results, and no time but `PrefillBudget`'s.
"""

from itertools import compress
from operator import mul
from typing import NamedTuple

import numpy as np

from .config import SchedulerConfig
from .plan import IntArray, LongArray, NewSequence, StepPlan
from .prefill_budget import PrefillBudget, PrefillLane, StepWork
from .running_set import BoolArray, InFlightStep, RunningSet
from .sequence import Sequence
from .waiting_queue import Fairness

MIN_PIPELINE_GROUP = 8
"""Decoding rows that share a step of a pipeline in any case: the cost of a step itself would be paid twice."""

_NO_ROWS: IntArray = np.zeros(0, np.int32)
_NO_PAIRS: IntArray = np.zeros((0, 2), np.int32)


class StepBuilder:
    """A step plan in the making; takes no blocks and decides nothing.

    `counts` [rows]: tokens each row computes in this step, 0 for those outside; at first those of decoding rows.
    `budget_left`: tokens not spent. `work`: everything it computes so far. `grown_rows`: rows whose tables grew.
    `short_of_blocks`: a row lacks blocks, so no sequence is admitted; and `admitted_rows` left enough blocks for the
    others, so they are never preempted in the same step.
    """

    def __init__(self, running: RunningSet, counts: IntArray, budget: int) -> None:
        self._running = running
        self.counts = counts
        # Few numbers are summed sooner as Python's: cold, one sum of numpy's takes 20 microseconds.
        decoding = counts.nonzero()[0]
        given, starts = counts[decoding].tolist(), running.scheduled[decoding].tolist()
        tokens = sum(given)
        self.work = StepWork(tokens, sum(map(mul, given, starts)))
        self.budget_left = budget - tokens
        self.grown_rows: list[int] = []
        self.admitted_rows: list[int] = []
        self.short_of_blocks = False

    def add_prompt_chunk(self, row: int, count: int) -> None:
        self.counts[row] = count
        self._spend(row, count)

    def remove_row(self, row: int) -> None:
        """Leave the row out of this step after all."""
        self._spend(row, -int(self.counts[row]))
        self.counts[row] = 0

    def _spend(self, row: int, count: int) -> None:
        start, (decoding, context, tokens, attended) = int(self._running.scheduled[row]), self.work
        if row in self._running.prefilling:
            self.work = StepWork(decoding, context, tokens + count, attended + count * (start + abs(count) // 2))
        else:
            self.work = StepWork(decoding + count, context + count * start, tokens, attended)
        self.budget_left -= count

    def finish_plan(self, step: int) -> tuple[StepPlan, InFlightStep] | None:
        """Write the step into the rows' counters; None when nothing runs (closed rows then ride with a plan that
        does)."""
        chosen = self.counts.nonzero()[0]
        if not len(chosen):
            return None
        rows, counts = self._running, self.counts[chosen]
        starts, expected = rows.scheduled[chosen], rows.expected[chosen]
        ends = starts + counts
        samples: BoolArray = ends == expected
        logits = self._num_logits(chosen, starts, counts, samples)
        new, appended = tuple([self._new_sequence(row) for row in self.admitted_rows]), self._appended()
        rows.scheduled[chosen], rows.expected[chosen] = ends, expected + samples
        sampled = list(compress(chosen.tolist(), samples.tolist()))
        for row in rows.prefilling.intersection(sampled) if rows.prefilling else ():
            rows.start_decoding(row)
        closed = np.array(rows.closed_rows, np.int32) if rows.closed_rows else _NO_ROWS
        rows.closed_rows.clear()
        plan = StepPlan(step, chosen.astype(np.int32), starts, counts, samples, logits, appended, new, closed)
        return plan, InFlightStep(step, chosen, ends, sampled, self.work)

    def _num_logits(self, chosen: LongArray, starts: IntArray, counts: IntArray, samples: BoolArray) -> IntArray:
        """One place for each sample; all places of a chunk that is followed by prompt tokens to be scored."""
        logits = samples.astype(np.int32)
        for row in self._running.scoring:
            if self.counts[row]:
                at = int(np.searchsorted(chosen, row))
                if starts[at] < len(self._running.sequences[row].request.prompt) - 1:
                    logits[at] = counts[at]
        return logits

    def _new_sequence(self, row: int) -> NewSequence:
        sequence, computed = self._running.sequences[row], int(self._running.scheduled[row])
        prompt = len(sequence.request.prompt)
        return NewSequence(row, sequence.known_tokens(), computed, sequence.sampling, prompt)

    def _appended(self) -> IntArray:
        """[A, 2] (row, block) of the blocks the executor has not been told of."""
        pairs: list[tuple[int, int]] = []
        for row in self.grown_rows:
            if self.counts[row]:
                fresh = self._running.tables[row].blocks[self._running.announced_blocks[row] :]
                self._running.announced_blocks[row] += len(fresh)
                pairs.extend((row, block) for block in fresh)
        return np.array(pairs, np.int32) if pairs else _NO_PAIRS


class PendingPrefill(NamedTuple):
    """A half-computed prompt and the tokens it lacks; tuples compare in the order in which prompts go on."""

    urgency: int
    service: float
    rank: int
    arrival_number: int
    row: int
    missing_tokens: int


class StepPacker:
    """Fills step builders; admits and preempts as it must."""

    def __init__(
        self, config: SchedulerConfig, running: RunningSet, fairness: Fairness, prefill: PrefillBudget
    ) -> None:
        self._config = config
        self._max_in_flight = config.max_in_flight
        self._groups = config.ahead + 1 if self._max_in_flight == 1 else 1
        self._rows, self._cache, self._waiting = running, running.cache, running.waiting
        self._fairness = fairness
        self._prefill = prefill
        self._blocked: tuple[Sequence | None, int] = None, 0
        self._now = 0

    def pack(self, step: int) -> StepBuilder:
        """Choose what step `step` computes."""
        self._now = step
        rows, budget, counts = self._rows, self._config.max_num_batched_tokens, self._decoding_counts()
        builder = StepBuilder(rows, counts, budget)
        if builder.budget_left < 0:  # never with one token each: the senior rows go first
            decoding = np.array(rows.by_seniority(counts.nonzero()[0]))
            wanted = counts[decoding]
            counts[decoding] = np.clip(budget - np.cumsum(wanted) + wanted, 0, wanted)
            builder = StepBuilder(rows, counts, budget)
        for row in rows.by_seniority((rows.scheduled + builder.counts > rows.capacity).nonzero()[0]):
            self._grow(builder, row)
        decoding_work = builder.work
        if (rows.prefilling or self._waiting.has_runnable) and not self._prefill.is_decode_probe(decoding_work):
            self._add_prompts(builder, decoding_work)
        return builder

    def _decoding_counts(self) -> IntArray:
        """[rows] tokens that decoding rows compute.

        In a pipeline a row waits for its own last result while plans of other rows may be under way. A plan then takes
        its share of all decoding rows: were they together, they would wait together, for one stage after the other.
        """
        counts = self._rows.decode_gaps()
        full = self._full_rows()
        if full is not None:
            counts[full] = 0
        if self._groups > 1:
            rows = counts.nonzero()[0]
            decoding = self._rows.num_running - len(self._rows.prefilling)
            share = max(-(-decoding // self._groups), MIN_PIPELINE_GROUP)
            if len(rows) > share:
                counts[self._rows.by_seniority(rows)[share:]] = 0
        return counts

    def _full_rows(self) -> BoolArray | None:
        """[rows] whether a row is in as many plans in flight as it may be in; None where none can be."""
        rows = self._rows
        if not rows.in_flight or (len(rows.in_flight) < self._max_in_flight and not rows.capped):
            return None
        full: BoolArray = rows.steps_in_flight() >= rows.max_in_flight
        return full

    # Prompts

    def _add_prompts(self, builder: StepBuilder, decoding: StepWork) -> None:
        """Spend the rest of the budget on prompts, short ones first; but half of it is for long ones, if there are any
        and they can use it."""
        short, long = self._half_computed()
        if not long and self._waiting.peek(self._now, long=True) is None:
            self._fill(builder, self._prefill.short_prompt_lane(decoding, builder.budget_left), short, long=False)
            return
        lane = self._prefill.short_prompt_lane(decoding, (builder.budget_left + self._now % 2) // 2)
        self._fill(builder, lane, short, long=False)
        self._fill(
            builder, self._prefill.long_prompt_lane(decoding, builder.work, builder.budget_left), long, long=True
        )
        lane.set_tokens_left(builder.budget_left)
        self._fill(builder, lane, short, long=False)

    def _half_computed(self) -> tuple[list[PendingPrefill], list[PendingPrefill]]:
        """Prefilling rows, those of short prompts and those of long ones; the next one to go on is the last."""
        rows, prefilling = self._rows, np.array(sorted(self._rows.prefilling), np.int64)
        full = self._full_rows()
        if full is not None:
            prefilling = prefilling[~full[prefilling]]
        missing = rows.known[prefilling] - rows.scheduled[prefilling]
        ranks = rows.seniority[prefilling] + missing // self._config.rank_step_tokens
        keys = self._fairness.fair_share_keys(rows.tenant_slot[prefilling], rows.seniority[prefilling], self._now)
        columns = (*keys, ranks, rows.arrival_number[prefilling], prefilling, missing)
        found = map(PendingPrefill._make, zip(*(column.tolist() for column in columns), strict=True))
        lanes: tuple[list[PendingPrefill], list[PendingPrefill]] = [], []
        for pending in sorted(found, reverse=True):
            lanes[bool(rows.long_prompt[pending.row])].append(pending)
        return lanes

    def _fill(self, builder: StepBuilder, lane: PrefillLane, pending: list[PendingPrefill], long: bool) -> None:
        """Spend a lane's part of the step: of one tenant's prompts by rank, of several tenants' on the one of the most
        urgent class that was served least."""
        while builder.budget_left and lane.has_room:
            waiting = self._admissible(builder, long)
            if pending and (waiting is None or self._precedes(pending[-1], waiting)):
                first = pending.pop()
                self._add_chunk(builder, lane, first.row, first.missing_tokens)
            elif waiting is None:
                return
            else:
                self._admit(builder, lane, waiting)

    def _precedes(self, pending: PendingPrefill, waiting: Sequence) -> bool:
        slot, seniority = int(self._rows.tenant_slot[pending.row]), int(self._rows.seniority[pending.row])
        if slot != waiting.tenant_slot and not self._waiting.is_rank_only_turn:
            mine = self._fairness.fair_share_key(slot, seniority, self._now)
            other = self._fairness.fair_share_key(waiting.tenant_slot, waiting.seniority, self._now)
            if mine != other:
                return mine < other
        return (pending.rank, pending.arrival_number) < (waiting.rank, waiting.arrival_number)

    def _add_chunk(self, builder: StepBuilder, lane: PrefillLane, row: int, missing: int) -> None:
        if self._rows.running[row]:  # it may have been preempted a moment ago
            tokens = lane.grant_tokens(missing, int(self._rows.scheduled[row]), builder.budget_left)
            builder.add_prompt_chunk(row, tokens)
            self._grow(builder, row)
            self._fairness.charge_prompt(int(self._rows.tenant_slot[row]), int(builder.counts[row]))

    # Admission

    def _admissible(self, builder: StepBuilder, long: bool) -> Sequence | None:
        """The sequence of a lane to be admitted next, unless rows or blocks are short. No sequence overtakes one that
        waits for blocks, and the last row is for the next of all."""
        if builder.short_of_blocks or not self._rows.num_free:
            return None
        first, next_of_all = self._waiting.peek(self._now, long), self._waiting.peek(self._now)
        if first is None or next_of_all is None or self._still_blocked(next_of_all) or self._still_blocked(first):
            return None
        return first if first is next_of_all or self._rows.num_free > 1 else None

    def _still_blocked(self, sequence: Sequence) -> bool:
        """Whether the sequence did not fit last time, and no more blocks are to be had than then."""
        blocked, available = self._blocked
        return sequence is blocked and self._cache.free_blocks - self._spare_blocks() <= available

    def _spare_blocks(self) -> int:
        """Blocks that a new sequence must leave: those promised to others, and optimistically one for each to grow."""
        reserved = self._rows.reserved_blocks()
        return reserved if self._config.admission == "no_evict" else reserved + self._rows.num_running

    def _admit(self, builder: StepBuilder, lane: PrefillLane, sequence: Sequence) -> None:
        """Give the sequence a row and its first chunk; or park it until a block it can share is computed; or note that
        it does not fit, whereupon none is admissible until more blocks are free."""
        awaited = self._cache.awaits(sequence.hashes, sequence.shareable_tokens)
        if awaited is not None:
            self._waiting.park_until_computed(sequence, awaited)
            return
        spare, free = self._spare_blocks(), self._cache.free_blocks
        table = self._cache.open(sequence.hashes, sequence.shareable_tokens)
        reserved = sequence.token_limit - 1 if self._config.admission == "no_evict" else sequence.known
        if not self._cache.room_for(table, reserved, spare):
            self._cache.close(table)
            self._blocked = (sequence, free - spare)
            return
        row, missing = self._rows.admit(sequence, table, reserved), sequence.known - table.cached
        self._rows.long_prompt[row] = self._prefill.is_long_prompt(missing, table.cached)
        builder.admitted_rows.append(row)
        builder.grown_rows.append(row)
        self._add_chunk(builder, lane, row, missing)

    # Blocks

    def _grow(self, builder: StepBuilder, row: int) -> None:
        """Let the row's table hold all that the step computes, at the cost of its juniors; or leave the row out."""
        if not builder.counts[row]:
            return
        table, end = self._rows.tables[row], int(self._rows.scheduled[row] + builder.counts[row])
        missing = self._cache.blocks_for(end) - len(table.blocks)
        if missing <= 0:
            return
        while not self._cache.extend(table, end):
            if not self._make_room(builder, row, missing):
                builder.remove_row(row)
                return
        self._rows.capacity[row] = len(table.blocks) * self._cache.block_size
        builder.grown_rows.append(row)

    def _make_room(self, builder: StepBuilder, row: int, missing: int) -> bool:
        """Preempt one sequence for `missing` blocks. False: the row itself was it, or blocks come back only when
        plans in flight are applied."""
        builder.short_of_blocks = True
        returning = sum(len(self._rows.tables[leaver].blocks) for leaver in self._rows.releasing)
        if returning + self._cache.free_blocks >= missing:
            return False
        victim = self._rows.preemption_victim()
        builder.remove_row(victim)
        self._rows.preempt(victim)
        return victim != row and victim not in self._rows.sequences
