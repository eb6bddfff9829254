"""What goes into one step: decoding rows first, then chunks of prompts, and blocks for all of them.

Prompts are half-computed or waiting, alike. Short ones go first, and long ones have a part of the step that short ones
cannot take: neither is stuck behind the other. Knows no results and no time but what `PrefillBudget` knows.
"""

from typing import NamedTuple

import numpy as np

from .config import SchedulerConfig
from .fairness import Fairness
from .plan import IntArray
from .prefill_budget import PrefillBudget, PrefillLane
from .rows import BoolArray
from .running_set import RunningSet
from .sequence import Sequence
from .step_builder import StepBuilder
from .step_time import StepWork

MIN_PIPELINE_GROUP = 8
"""Decoding rows that share a step of a pipeline in any case: what a step costs whoever is in it would be paid twice."""


class PendingPrefill(NamedTuple):
    """What a half-computed prompt still lacks, in the order of `StepPacker._fill`."""

    urgency: int
    service: float
    rank: int
    arrival_number: int
    row: int
    missing_tokens: int


class StepPacker:
    """Packs drafts; admits and preempts as it must."""

    def __init__(self, config: SchedulerConfig, stays: RunningSet, fairness: Fairness, pace: PrefillBudget) -> None:
        self._config = config
        self._in_flight_cap = config.in_flight_per_sequence or config.ahead + 1
        self._groups = config.ahead + 1 if self._in_flight_cap == 1 else 1
        self._stays = stays
        self._rows, self._cache, self._line = stays.rows, stays.cache, stays.waiting
        self._fairness = fairness
        self._pace = pace
        self._blocked: tuple[Sequence | None, int] = None, 0
        self._now = 0

    def pack(self, step: int) -> StepBuilder:
        """What step `step` computes."""
        self._now = step
        budget, counts = self._config.max_num_batched_tokens, self._decoding()
        draft = StepBuilder(self._rows, counts, budget)
        if draft.budget_left < 0:
            draft = StepBuilder(self._rows, self._seniors(counts, budget), budget)
        for row in draft.rows_lacking_blocks:
            self._grow(draft, row)
        decoding = draft.work
        if (self._rows.prefilling or self._line.has_runnable) and not self._pace.is_decode_probe(decoding):
            self._close_gaps(draft, decoding)
        return draft

    def _decoding(self) -> IntArray:
        """[rows] what sequences that caught up could compute of what their last result brought."""
        counts = self._rows.decode_gaps()
        if self._crowded:
            counts[self._full()] = 0
        if self._groups > 1:
            self._share_out(counts)
        return counts

    def _seniors(self, counts: IntArray, budget: int) -> IntArray:
        """Senior ones first, if the budget is short (never with one token each)."""
        rows = np.array(self._rows.by_seniority(counts.nonzero()[0]))
        wanted = counts[rows]
        counts[rows] = np.clip(budget - np.cumsum(wanted) + wanted, 0, wanted)
        return counts

    @property
    def _crowded(self) -> bool:
        """There may be rows in as many plans as they may be in."""
        return len(self._rows.in_flight) >= self._in_flight_cap

    def _full(self) -> BoolArray:
        """[rows] those that are."""
        full: BoolArray = self._rows.in_flight.steps_per_row(self._rows.size) >= self._in_flight_cap
        return full

    def _share_out(self, counts: IntArray) -> None:
        """Where a row waits for its own last result while plans of other rows may be under way, a plan takes its share
        of all that decode: were they together, they would wait together, for one stage after the other."""
        rows = counts.nonzero()[0]
        decoding = self._rows.num_running - len(self._rows.prefilling)
        share = max(-(-decoding // self._groups), MIN_PIPELINE_GROUP)
        if len(rows) > share:
            counts[self._rows.by_seniority(rows)[share:]] = 0

    # Prompts

    def _close_gaps(self, draft: StepBuilder, decoding: StepWork) -> None:
        """What remains of the budget goes to prompts, short ones first; but half of it is for long ones, if there are
        any and they can use it."""
        short, long = self._half_computed()
        if not long and self._line.peek_lane(True, self._now) is None:
            self._fill(draft, self._pace.short_prompt_lane(decoding, draft.budget_left), short, long=False)
            return
        lane = self._pace.short_prompt_lane(decoding, (draft.budget_left + self._now % 2) // 2)
        self._fill(draft, lane, short, long=False)
        self._fill(draft, self._pace.long_prompt_lane(decoding, draft.work, draft.budget_left), long, long=True)
        lane.set_tokens_left(draft.budget_left)
        self._fill(draft, lane, short, long=False)

    def _fill(self, draft: StepBuilder, lane: PrefillLane, gaps: list[PendingPrefill], long: bool) -> None:
        """A lane's part of the step goes, of one tenant by rank, of several to the one of the most urgent class that
        was served least."""
        while draft.budget_left and lane.has_room:
            waiting = self._admissible(draft, long)
            if gaps and (waiting is None or self._precedes(gaps[-1], waiting)):
                gap = gaps.pop()
                self._chunk(draft, lane, gap.row, gap.missing_tokens)
            elif waiting is None:
                return
            else:
                self._admit(draft, lane, waiting)

    def _half_computed(self) -> tuple[list[PendingPrefill], list[PendingPrefill]]:
        """Of running sequences that never caught up, short prompts and long ones; the next one is the last here."""
        rows, behind = self._rows, np.array(sorted(self._rows.prefilling), np.int64)
        if self._crowded:
            behind = behind[~self._full()[behind]]
        gaps = rows.known[behind] - rows.scheduled[behind]
        ranks = rows.seniority[behind] + gaps // self._config.rank_step_tokens
        standings = self._fairness.fair_share_keys(rows.tenant_slot[behind], rows.seniority[behind], self._now)
        columns = (*standings, ranks, rows.arrival_number[behind], behind, gaps)
        ordered = sorted(
            map(PendingPrefill._make, zip(*(column.tolist() for column in columns), strict=True)), reverse=True
        )
        return [gap for gap in ordered if not rows.long_prompt[gap.row]], [
            gap for gap in ordered if rows.long_prompt[gap.row]
        ]

    def _precedes(self, gap: PendingPrefill, waiting: Sequence) -> bool:
        slot, seniority = int(self._rows.tenant_slot[gap.row]), int(self._rows.seniority[gap.row])
        if slot != waiting.tenant_slot and not self._line.is_rank_only_turn:
            mine = self._fairness.fair_share_key(slot, seniority, self._now)
            other = self._fairness.fair_share_key(waiting.tenant_slot, waiting.seniority, self._now)
            if mine != other:
                return mine < other
        return (gap.rank, gap.arrival_number) < (waiting.rank, waiting.arrival_number)

    def _chunk(self, draft: StepBuilder, lane: PrefillLane, row: int, gap: int) -> None:
        if self._rows.running[row]:  # it may have been preempted a moment ago
            draft.add_prompt_chunk(row, lane.grant_tokens(gap, int(self._rows.scheduled[row]), draft.budget_left))
            self._grow(draft, row)
            self._fairness.charge_prompt(int(self._rows.tenant_slot[row]), int(draft.counts[row]))

    # Admission

    def _admissible(self, draft: StepBuilder, long: bool) -> Sequence | None:
        """Who of a lane is to be admitted next, unless rows or blocks are short. Nobody overtakes who waits for
        blocks, and the last row is for who is next of all."""
        if draft.short_of_blocks or not self._rows.num_free:
            return None
        first, next_of_all = self._line.peek_lane(long, self._now), self._line.peek(self._now)
        if first is None or next_of_all is None or self._still_blocked(next_of_all) or self._still_blocked(first):
            return None
        return first if first is next_of_all or self._rows.num_free > 1 else None

    def _still_blocked(self, sequence: Sequence) -> bool:
        """No more blocks are to be had than when it last did not fit."""
        blocked, available = self._blocked
        return sequence is blocked and self._cache.free_blocks - self._spare() <= available

    def _spare(self) -> int:
        """Blocks a newcomer must leave: what others were promised, and optimistically one for each to grow."""
        claims = self._rows.reserved_blocks()
        return claims if self._config.admission == "no_evict" else claims + self._rows.num_running

    def _admit(self, draft: StepBuilder, lane: PrefillLane, sequence: Sequence) -> None:
        """Give it a row and its first chunk; or set it aside until a block it can share is computed; or note that it
        does not fit, whereupon nobody is admissible until more blocks are free."""
        awaited = self._cache.awaits(sequence.hashes, sequence.shareable_tokens)
        if awaited is not None:
            self._line.park_until_computed(sequence, awaited)
            return
        spare, free = self._spare(), self._cache.free_blocks
        table = self._cache.open(sequence.hashes, sequence.shareable_tokens)
        reserve = sequence.token_limit - 1 if self._config.admission == "no_evict" else sequence.known
        if not self._cache.room_for(table, reserve, spare):
            self._cache.close(table)
            self._blocked = (sequence, free - spare)
            return
        row = self._stays.admit(sequence, table, reserve)
        self._rows.long_prompt[row] = self._pace.is_long_prompt(sequence.known - table.cached, table.cached)
        draft.admitted_rows.append(row)
        draft.grown_rows.append(row)
        self._chunk(draft, lane, row, sequence.known - table.cached)

    # Blocks

    def _grow(self, draft: StepBuilder, row: int) -> None:
        """Let the row's table hold what the draft computes, at the cost of its juniors; or leave it out."""
        if not draft.counts[row]:
            return
        table, end = self._rows.tables[row], draft.end_after(row)
        if self._cache.blocks_for(end) <= len(table.blocks):
            return
        while not self._cache.extend(table, end):
            if not self._make_room(draft, row, self._cache.blocks_for(end) - len(table.blocks)):
                draft.remove_row(row)
                return
        self._rows.capacity[row] = len(table.blocks) * self._cache.block_size
        draft.grown_rows.append(row)

    def _make_room(self, draft: StepBuilder, row: int, missing: int) -> bool:
        """Preempt one sequence for `missing` blocks. False: the row itself was it, or blocks come back only when
        plans in flight are applied."""
        draft.short_of_blocks = True
        returning = sum(len(self._rows.tables[leaver].blocks) for leaver in self._rows.releasing)
        if returning + self._cache.free_blocks >= missing:
            return False
        victim = self._rows.preemption_victim()
        draft.remove_row(victim)
        self._stays.preempt(victim)
        return victim != row and victim not in self._rows.sequences
