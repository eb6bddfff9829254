"""One step's content: decoding rows first, then chunks of prompts, and blocks for all of them.

Half-computed and waiting prompts are treated alike. Short ones go first, and long ones have a part of the step of their
own: neither is stuck behind the other. Knows no results, and no time but `PrefillBudget`'s.
"""

from functools import partial
from itertools import chain, islice
from math import inf
from operator import mul
from typing import NamedTuple

import numpy as np

from ..core.metrics import SequenceState
from ..kvcache.block_hashes import shared_blocks
from .config import SchedulerConfig
from .drafts.step_drafts import StepDrafts
from .events.block_contents import block_contents
from .packed_step import PackedStep
from .plan import NO_ROWS, StepPlan, StepWork
from .prefill_budget import LINE_LENGTH, PrefillBudget, PrefillLane, StepDemand, WaitingPrompt
from .running_set import InFlightStep, RunningSet
from .sequence import Sequence, most_uncut
from .tenants.fairness import Fairness
from .waiting_queue import queue_order

MIN_PIPELINE_GROUP = 8
"""Decoding rows that share a step of a pipeline in any case: the cost of a step itself would be paid twice."""


class _PendingPrefill(NamedTuple):
    """A half-computed prompt and the tokens it lacks; tuples compare in the order in which prompts go on."""

    urgency: int
    service: float
    rank: int
    arrival_number: int
    row: int
    missing_tokens: int
    sequence: Sequence


class StepPacker:
    """Step number `step` in the making, at `clock` seconds; admits and preempts as it must."""

    def __init__(
        self,
        config: SchedulerConfig,
        rows: RunningSet,
        fairness: Fairness,
        prefill: PrefillBudget,
        step: int,
        clock: float,
        drafting: StepDrafts | None = None,
    ) -> None:
        self._config = config
        self._rows = rows
        self._fairness = fairness
        self._prefill = prefill
        self._drafting = drafting
        self._step, self._clock = step, clock
        self._cache = rows.cache
        self._waiting = rows.waiting
        self._no_evict = config.admission == "no_evict"
        # [rows] tokens that each row computes in this step, 0 for those outside; of decoding rows at first. The last
        # token of all is never computed: nothing follows it.
        self._counts = np.maximum(np.minimum(rows.expected, rows.decode_limit), rows.scheduled) - rows.scheduled
        self._budget_left = config.max_num_batched_tokens
        self._work = StepWork()  # everything it computes so far
        self._admitted_rows: list[int] = []  # they left enough blocks for the others: never preempted in the same step
        self._drafts: dict[int, list[int]] = {}  # tokens that rows are to verify
        # No sequence is admitted while a row lacks blocks, or the next one must compute more together than is left.
        self._short_of_blocks = self._short_of_tokens = False

    def pack(self) -> tuple[StepPlan, InFlightStep] | None:
        """Choose what the step computes; None when nothing runs (closed rows then ride with a plan that does)."""
        self._choose_decoding_rows()
        waits = self._rows.prefilling or self._waiting.has_runnable
        if waits and not self._prefill.is_decode_probe(self._work):
            self._add_prompts()
        packed = PackedStep(self._rows, self._step, self._work, self._counts, self._drafts)
        if not len(packed.rows):
            return None
        proposals = NO_ROWS if self._drafting is None else self._drafting.plan_proposals(packed)
        return packed.write(self._admitted_rows, proposals)

    def wait_reason(self) -> SequenceState:
        """What a sequence that is still in line after `pack` waits for."""
        blocked, _ = self._rows.blocked
        heads = [self._waiting.peek(self._step, long) for long in (None, False, True)]
        if self._short_of_blocks or (self._rows.num_free and blocked is not None and blocked in heads):
            return SequenceState.NO_BLOCKS
        return SequenceState.NO_TOKENS if self._rows.num_free else SequenceState.NO_ROW

    # Decoding rows

    def _choose_decoding_rows(self) -> None:
        """Leave out rows that may not be in another plan, or are beyond the budget; give the others blocks. In a
        pipeline a plan takes its share of decoding rows: together, they would wait for one stage after the other."""
        rows, counts = self._rows, self._counts
        full = rows.full_rows()
        if full is not None:
            counts[full] = 0
        decoding = counts.nonzero()[0]
        if rows.most_in_flight == 1 and self._config.ahead:
            decoders, groups = rows.num_running - len(rows.prefilling), self._config.ahead + 1
            share = max(-(-decoders // groups), MIN_PIPELINE_GROUP)
            if len(decoding) > share:
                counts[rows.by_seniority(decoding)[share:]] = 0
                decoding = counts.nonzero()[0]
        # Few numbers are summed sooner as Python's: cold, one sum of numpy's takes 20 microseconds.
        computed = counts[decoding].tolist()
        if rows.constrained.keys and sum(computed) > len(computed):
            rows.constrained.limit_forced(counts, rows.by_seniority(decoding))
            computed = counts[decoding].tolist()
        if sum(computed) > self._budget_left:  # never with one token each: the senior rows go first
            decoding = np.array(rows.by_seniority(decoding))
            wanted = counts[decoding]
            counts[decoding] = np.clip(self._budget_left - np.cumsum(wanted) + wanted, 0, wanted)
            computed = counts[decoding].tolist()
        tokens = sum(computed)
        self._budget_left -= tokens
        self._work = StepWork(tokens, sum(map(mul, computed, rows.scheduled[decoding].tolist())))
        for row in rows.by_seniority((rows.scheduled + counts > rows.capacity).nonzero()[0]):
            self._grow(row)
        if self._drafting is not None:
            for row, drafts in self._drafting.choose(counts, self._budget_left, self._work.decode_tokens, self._step):
                self._drafts[row] = drafts
                self._set_count(row, int(counts[row]) + len(drafts))
                self._grow(row)

    # Prompts

    def _add_prompts(self) -> None:
        """Spend the rest of the budget on prompts, short ones first; half of it on long ones, if any can use it."""
        short, long = self._half_computed()
        budget, waiting = self._budget_left, self._waiting.peek(self._step, long=True)
        mixed = bool(long) or waiting is not None
        pace = self._prefill.pace(self._demand([*short, *long], mixed))
        if not mixed:
            self._fill(pace.short_prompt_lane(budget), short, long=False)
            return
        left_to_long = most_uncut([*(pending.sequence for pending in long), waiting])
        lane = pace.short_prompt_lane(min((budget + self._step % 2) // 2, budget - left_to_long))
        self._fill(lane, short, long=False)
        self._fill(pace.long_prompt_lane(self._work, self._budget_left), long, long=True)
        lane.tokens = self._budget_left
        self._fill(lane, short, long=False)

    def _demand(self, half_computed: list[_PendingPrefill], mixed: bool) -> StepDemand:
        """The decoding rows of the step and the prompts that wait for their first token."""
        line = self._waiting_line(half_computed)
        if not self._rows.itl_targets:
            return StepDemand(self._work, line, mixed=mixed)
        targets = [self._rows.itl_targets.get(row) for row in self._counts.nonzero()[0].tolist()]
        wanted = [target for target in targets if target is not None]
        return StepDemand(self._work, line, min(wanted, default=inf), len(wanted) < len(targets), mixed)

    def _half_computed(self) -> tuple[list[_PendingPrefill], list[_PendingPrefill]]:
        """The half-computed prompts, short ones and long ones, that may be in a plan now; the next to go on is the
        last."""
        rows, full = self._rows, self._rows.full_rows()
        prefilling = [row for row in rows.prefilling if full is None or not full[row]]
        several = len({rows.sequences[row].tenant_slot for row in prefilling}) > 1  # else rank alone decides
        step_tokens = self._config.rank_step_tokens
        prefills: list[_PendingPrefill] = []
        for row in prefilling:
            sequence, missing = rows.sequences[row], int(rows.known[row] - rows.scheduled[row])
            key = self._fairness.fair_share_key(sequence, self._step) if several else (0, 0.0)
            rank = sequence.seniority + missing // step_tokens
            prefills.append(_PendingPrefill(*key, rank, sequence.arrival_number, row, missing, sequence))
        prefills.sort(reverse=True)
        lanes: tuple[list[_PendingPrefill], list[_PendingPrefill]] = [], []
        for pending in prefills:
            lanes[pending.sequence.long_prompt].append(pending)
        return lanes

    def _waiting_line(self, half_computed: list[_PendingPrefill]) -> list[WaitingPrompt]:
        """The first prompts that wait for their first token: of the half-computed ones, then of those without a row."""
        line = list[WaitingPrompt]()
        pending = ((prefill.sequence, int(self._rows.scheduled[prefill.row])) for prefill in half_computed)
        others = ((sequence, sequence.shared) for sequence in self._waiting.first(LINE_LENGTH))
        for sequence, computed in islice(chain(pending, others), LINE_LENGTH):
            target = sequence.target_ttft
            if target != inf and not sequence.outputs:
                waited = self._clock - sequence.arrived_at
                calm = target is None and sequence.has_media_after(sequence.shared)
                line.append(WaitingPrompt(sequence.known - computed, computed, waited, target, calm))
        if any(prompt.calm for prompt in line) and not self._rows.decodes_text:
            return [prompt._replace(calm=False) for prompt in line]  # streams of images alone would keep others waiting
        return line

    def _fill(self, lane: PrefillLane, pending: list[_PendingPrefill], long: bool) -> None:
        """Spend a lane's part of the step on prompts by rank, but first on those of the least served tenant of the most
        urgent class."""
        while self._budget_left and lane.has_room:
            waiting = self._admissible(long)
            if pending and (waiting is None or self._precedes(pending[-1], waiting)):
                first = pending.pop()
                if self._rows.running[first.row]:  # it may have been preempted a moment ago
                    self._add_chunk(lane, first.row, first.missing_tokens)
            elif waiting is None:
                return
            else:
                self._admit(lane, waiting)

    def _precedes(self, pending: _PendingPrefill, waiting: Sequence) -> bool:
        if pending.sequence.tenant_slot != waiting.tenant_slot and not self._waiting.is_rank_only_turn:
            mine = self._fairness.fair_share_key(pending.sequence, self._step)
            other = self._fairness.fair_share_key(waiting, self._step)
            if mine != other:
                return mine < other
        return (pending.rank, pending.arrival_number) < queue_order(waiting)

    def _add_chunk(self, lane: PrefillLane, row: int, missing: int) -> None:
        sequence, start = self._rows.sequences[row], int(self._rows.scheduled[row])
        granted = lane.grant_tokens(missing, start, self._budget_left)
        self._set_count(row, sequence.uncut_chunk(start, granted, self._budget_left))
        self._grow(row)
        self._fairness.charge_prompt(sequence.tenant_slot, int(self._counts[row]))

    def _set_count(self, row: int, count: int) -> None:
        """Let the row compute a chunk, or leave it out of the step after all."""
        change, start = count - int(self._counts[row]), int(self._rows.scheduled[row])
        decoding, context, tokens, attended = self._work
        if row in self._rows.prefilling:
            self._work = StepWork(decoding, context, tokens + change, attended + change * (start + abs(change) // 2))
        else:
            self._work = StepWork(decoding + change, context + change * start, tokens, attended)
        self._budget_left -= change
        self._counts[row] = count

    # Admission

    def _admissible(self, long: bool) -> Sequence | None:
        """A lane's next sequence. None overtakes one that waits for blocks; the last row is for the next of all."""
        if self._short_of_blocks or self._short_of_tokens or not self._rows.num_free:
            return None
        first, next_of_all = self._waiting.peek(self._step, long), self._waiting.peek(self._step)
        if first is None or (first is not next_of_all and self._rows.num_free == 1):
            return None
        if first.spec.encoded is not None and self._admitted_rows:
            return None  # keys and values are made of it before the others of its first step go on
        blocked, available = self._rows.blocked
        if blocked not in (first, next_of_all):
            return first
        return first if self._cache.admissible_blocks - self._rows.spare_blocks(self._no_evict) > available else None

    def _admit(self, lane: PrefillLane, sequence: Sequence) -> None:
        """Give the sequence a row and its first chunk; set it aside for a shared block or an adapter; or admit none."""
        awaited = self._awaited(sequence)
        if awaited is not None:
            self._waiting.set_aside(sequence, awaited)
            return
        if self._rows.adapters is not None and not self._rows.adapters.admits(sequence, self._step):
            return
        spare, free = self._rows.spare_blocks(self._no_evict), self._cache.admissible_blocks
        table = self._cache.open(sequence.hashes, sequence.shareable_tokens)
        reserved = sequence.token_limit - 1 if self._no_evict else sequence.known
        if not self._cache.room_for(table, reserved, spare):
            self._cache.close(table)
            self._rows.blocked = (sequence, free - spare)
            return
        self._cache.restore(table, sequence.shareable_tokens, partial(self._describe, sequence))
        if not sequence.uncut_chunk(table.cached, 1, self._budget_left):
            self._cache.close(table)
            self._short_of_tokens = True
            return
        row, missing = self._rows.admit(sequence, table, reserved), sequence.known - table.cached
        calm = sequence.has_media_after(table.cached)
        sequence.long_prompt = self._prefill.is_long_prompt(missing, table.cached, calm)
        self._admitted_rows.append(row)
        self._add_chunk(lane, row, missing)

    def _awaited(self, sequence: Sequence) -> bytes | None:
        """The last block that the sequence waits for."""
        hashes = sequence.hashes
        last = self._cache.awaits(hashes, sequence.shareable_tokens)
        if last is None:
            return None
        end = hashes.index(last) + 1
        to_come = self._blocks_to_come(sequence, end)
        return last if to_come == end else self._cache.awaits(hashes, to_come * self._cache.block_size + 1)

    def _blocks_to_come(self, sequence: Sequence, end: int) -> int:
        """Its first blocks, up to the `end`, but for those that it would compute before other rows do: they wait for
        their own turn, which may be late where they are less urgent."""
        hashes, rows, size = sequence.hashes, self._rows, self._cache.block_size
        cached = self._cache.found_tokens(hashes, sequence.shareable_tokens)
        missing, calm = sequence.known - cached, sequence.has_media_after(cached)
        turn, long = self._turn(sequence, missing), self._prefill.is_long_prompt(missing, cached, calm)
        most = 0
        for row in rows.promisers(hashes[:end]):
            other, computed = rows.sequences[row], int(rows.scheduled[row])
            shared = min(shared_blocks(rows.tables[row].promised, hashes), end)
            is_late = other.long_prompt > long or turn < self._turn(other, int(rows.known[row]) - computed)
            if is_late or not rows.running[row]:
                shared = min(shared, (computed + int(self._counts[row])) // size)
            most = max(most, shared)
            if most == end:
                break
        return most

    def _turn(self, sequence: Sequence, missing: int) -> tuple[int, int, int]:
        """Of a tenant's prompts, that lack so many tokens, the lowest goes on first."""
        urgency, _ = self._fairness.fair_share_key(sequence, self._step)
        return urgency, sequence.seniority + missing // self._config.rank_step_tokens, sequence.arrival_number

    def _describe(self, sequence: Sequence, first: int, end: int) -> None:
        if self._cache.events is not None:
            self._cache.events.describe(block_contents(sequence, first, end, self._cache.block_size))

    # Blocks

    def _grow(self, row: int) -> None:
        """Let the row's table hold all that the step computes, at the cost of its juniors; or leave the row out."""
        if not self._counts[row]:
            return
        end = int(self._rows.scheduled[row] + self._counts[row])
        while not self._rows.extend(row, end):
            if not self._make_room(row, self._cache.missing_blocks(self._rows.tables[row], end)):
                self._set_count(row, 0)
                return

    def _make_room(self, row: int, missing: int) -> bool:
        """Preempt the youngest running row of the lowest class for `missing` blocks. False: the row itself was it, or
        blocks come back only when plans in flight are applied."""
        self._short_of_blocks = True
        returning = sum(self._cache.held_blocks(self._rows.tables[leaver]) for leaver in self._rows.releasing)
        if returning + self._cache.free_blocks >= missing:
            return False
        victim = self._rows.by_seniority(np.flatnonzero(self._rows.running))[-1]
        self._set_count(victim, 0)
        self._rows.totals.preemptions += 1
        self._rows.remove(victim)
        return victim != row and victim not in self._rows.sequences
