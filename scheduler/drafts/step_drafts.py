"""Drafts in steps: which rows verify how many, what became of them, and what a draft model is to propose next.

The one object that the scheduler asks about drafts, where there is speculation.
"""

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import NamedTuple

import numpy as np

from ..packed_step import PackedStep
from ..plan import NO_ROWS, IntArray, StepResult
from ..running_set import InFlightStep, RunningSet
from ..sequence import Sequence, most_uncut
from ..tenants.fairness import Fairness
from .proposals import Proposals
from .speculation import Speculation, drafts_of


class VerifiedDrafts(NamedTuple):
    """What became of a step's drafts."""

    rejected: Mapping[int, int] = {}
    """How many of a row's drafts were wrong, where some were."""
    counts: list[tuple[int, int, int]] = []
    """As `StepUpdates.drafts`."""


NO_DRAFTS = VerifiedDrafts()


class StepDrafts:
    """Asks `speculation` for the drafts of `rows`; tokens of wrong drafts are charged to tenants by `fairness`."""

    def __init__(self, speculation: Speculation, rows: RunningSet, fairness: Fairness, no_evict: bool) -> None:
        self._speculation = speculation
        self._rows = rows
        self._fairness = fairness
        self._no_evict = no_evict

    def choose(self, counts: IntArray, left: int, decoding: int, step: int) -> Iterator[tuple[int, list[int]]]:
        """The drafts of rows that sample in a `step` in the making, which computes `counts` tokens of each row and has
        room for `left` more. Each row's blocks are to be taken before the next is asked for: no other row is preempted
        for drafts."""
        rows, speculation = self._rows, self._speculation
        if not (rows.drafting and speculation.is_due(step)):
            return
        due = (rows.known >= rows.drafts_from).nonzero()[0]
        if not len(due):
            return
        left -= most_uncut([*map(rows.sequences.get, rows.prefilling), rows.waiting.peek(step)])
        left = min(left, speculation.most_sampled - rows.num_running - len(rows.waiting))
        if rows.states is not None:
            left = min(left, rows.states.most_drafts)
        wanted: dict[int, int] = {}
        known, computed = rows.known[due], counts[due]
        ready = (computed > 0) & (rows.scheduled[due] + computed == known) & (rows.expected[due] == known)
        for row in due[ready].tolist():
            most = self._room_after(row, int(rows.known[row]), min(drafts_of(rows.sequences[row]).most, left))
            if most > 0:
                wanted[row] = most
                left -= most
        requests = [(rows.sequences[row], most) for row, most in wanted.items()]
        proposed = speculation.draft(requests, decoding, step) if requests else []
        for row, tokens in zip(wanted, proposed, strict=True):
            rows.drafts_from[row] = drafts_of(rows.sequences[row]).resume_at
            if drafts := tokens[: self._room_after(row, int(rows.known[row]), len(tokens))]:
                yield row, drafts

    def _room_after(self, row: int, end: int, most: int) -> int:
        """How many of `most` tokens after its first `end` ones the row has, or may take, blocks for, the last apart."""
        rows, cache = self._rows, self._rows.cache
        held = int(rows.capacity[row])
        most = min(most, int(rows.token_limit[row]) - 1 - end)
        if end + most <= held or self._no_evict:
            return most
        spans = cache.free_blocks // cache.span_blocks
        return min(most, held - end + cache.block_size * max(spans - rows.num_running, 0))

    def plan_proposals(self, packed: PackedStep) -> IntArray:
        """How many tokens the draft model proposes for each chosen row's next step. The row gets blocks for them now,
        even if all drafts of this step are right. The model goes along with half-computed prompts."""
        speculation = self._speculation
        if not (speculation.draft_model and speculation.asks_draft_model):
            return NO_ROWS
        rows, asked, requests = self._rows, list[tuple[int, int, int]](), list[tuple[Sequence, int]]()
        for index, (row, end) in enumerate(zip(packed.rows.tolist(), packed.ends.tolist(), strict=True)):
            sequence = rows.sequences[row]
            if sequence.drafts is not None:
                most = min(speculation.most, sequence.drafts.most, int(rows.token_limit[row]) - 2 - end)
                asked.append((index, row, end))
                requests.append((sequence, max(most, 0)))
        lengths = np.zeros(len(packed.rows), np.int32)
        wanted = speculation.propose(requests, len(packed.rows)) if requests else []
        for (index, row, end), length in zip(asked, wanted, strict=True):
            lengths[index] = length
            if packed.samples[index] and length:
                lengths[index] = max(self._room_after(row, end, length), 0)
                rows.extend(row, end + int(lengths[index]))
        return lengths if lengths.any() else NO_ROWS

    def take_result(
        self, flight: InFlightStep, result: StepResult, seconds: float | None, host_seconds: float
    ) -> VerifiedDrafts:
        """Learn what became of the drafts of a step, which took `seconds`, if that is known, and was launched
        `host_seconds` after the one before; keep what a draft model proposes."""
        drafts = self._count(flight, result) if flight.drafts else {}
        if seconds and not flight.work.prefill_tokens and (self._rows.drafting or drafts):
            drafted, accepted = map(sum, zip(*drafts.values(), strict=True)) if drafts else (0, 0)
            tokens = flight.work.decode_tokens
            self._speculation.costs.observe_step(tokens, seconds, drafted, accepted, host_seconds)
        if result.proposals.passes:
            self._take_proposals(result.proposals)
        if not drafts:
            return NO_DRAFTS
        rejected = {row: drafted - accepted for row, (drafted, accepted) in drafts.items() if drafted > accepted}
        live = [(self._rows.keys[row], *counts) for row, counts in drafts.items() if not self._rows.ended[row]]
        return VerifiedDrafts(rejected, live)

    def _count(self, flight: InFlightStep, result: StepResult) -> dict[int, tuple[int, int]]:
        """For each row that had drafts, their number and how many were right. The others are paid for as prompt tokens
        are."""
        drafts: dict[int, tuple[int, int]] = {}
        sampled = result.counts - result.forced if len(result.forced) else result.counts
        for row, count in zip(result.rows.tolist(), sampled.tolist(), strict=True):
            if drafted := flight.drafts.get(row, 0):
                drafts[row] = drafted, count - 1
                if not self._rows.ended[row]:
                    self._speculation.observe(self._rows.sequences[row], drafted, count - 1)
                    self._fairness.charge_prompt(self._rows.sequences[row].tenant_slot, drafted + 1 - count)
        return drafts

    def _take_proposals(self, proposals: Proposals) -> None:
        """Keep what the draft model proposes, each with its sequence."""
        self._speculation.take_proposals(proposals)
        tokens = iter(proposals.tokens.tolist())
        columns = proposals.rows, proposals.positions, proposals.counts
        for row, position, count in zip(*(column.tolist() for column in columns), strict=True):
            drafts_of(self._rows.sequences[row]).proposed = position, [*islice(tokens, count)]
