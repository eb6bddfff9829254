"""The head that drafts for a target by going on from its hidden states."""

from itertools import compress
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...scheduler.drafts.proposals import Proposals, proposals_of
from ...scheduler.plan import IntArray, LongArray, StepPlan, StepResult
from ..attention.backend import AttentionBackend
from ..layers.step_context import StepContext
from ..models.draft_head import DraftHead, HeadStep
from ..models.native_decoder import NativeDecoder
from ..step_batch import HostCopy, SampledTokens, to_device
from .row_states import RowStates
from .step_drafter import DraftPass, StepDrafter


class _HeadRow(NamedTuple):
    """A row of a step: places `first` to `end` are computed with the head, from the target's states that begin at the
    packed place `states`; a row that was `sampled` gets `most` proposals then."""

    row: int
    first: int
    end: int
    states: int
    sampled: bool
    most: int


class _HeadPass(NamedTuple):
    """A head's pass, and its own states [S, hidden] where it chooses tokens."""

    drafted: DraftPass
    states: Tensor


class HeadDrafter(StepDrafter):
    """A head. Its cache lacks the places of steps for which nothing was to be proposed: their hidden states are gone,
    and it attends to whatever is there. So it does at the last place of a prefix that another row computed, which was
    followed by that row's token. `positions`: the longest sequence."""

    def __init__(
        self,
        head: DraftHead,
        attention: AttentionBackend,
        target: NativeDecoder,
        rows: RowStates,
        positions: int,
        draws: bool = False,
    ) -> None:
        super().__init__(head, attention, rows, draws)
        self._head = head
        self._target = target
        self._positions = positions

    def forget(self, blocks: int) -> None:
        """See `StepDrafter.forget`: a head keeps no state of rows."""

    def apply_plan(self, plan: StepPlan) -> None:
        """See `StepDrafter.apply_plan`: a head keeps no state of rows."""

    def propose(self, plan: StepPlan, result: StepResult) -> Proposals:
        began = perf_counter()
        rows = self._rows_to_compute(plan, result)
        if not rows:
            return Proposals()
        places = np.concatenate([np.arange(row.states, row.states + row.end - row.first) for row in rows])
        spans = np.array([(row.row, row.first, row.end - row.first) for row in rows], np.int32)
        states = torch.cat([*self._target.kept], -1)[self._to(places)]
        passes = [self._begin(spans, np.array([row.sampled for row in rows]), states, True)]
        ready = remaining = [row for row in rows if row.sampled]
        proposed: dict[int, list[int]] = {row.row: [] for row in ready}
        for place in range(1, max((row.most for row in ready), default=0)):
            states = passes[-1].states
            goes_on = [row.most > place for row in remaining]
            if not all(goes_on):
                passes[-1].drafted.finish()
                states = states[self._to(np.flatnonzero(goes_on))]
                remaining = [*compress(remaining, goes_on)]
            spans = np.array([(row.row, row.end + place - 1, 1) for row in remaining], np.int32)
            passes.append(self._begin(spans, np.ones(len(spans), np.bool_), states))
        for place, head_pass in enumerate(passes):
            drafting = (row for row in ready if row.most > place)
            for row, token in zip(drafting, head_pass.drafted.read().tolist(), strict=True):
                proposed[row.row].append(token)
        proposals = [(row.row, row.end + 1, proposed[row.row]) for row in ready]
        return proposals_of(proposals, perf_counter() - began, len(passes), len(places))

    def _rows_to_compute(self, plan: StepPlan, result: StepResult) -> list[_HeadRow]:
        known = dict(zip(result.rows.tolist(), (result.offsets + result.counts).tolist(), strict=True))
        columns = plan.rows, plan.starts, plan.counts, np.cumsum(plan.counts) - plan.counts, plan.proposals
        rows = []
        for row, start, count, states, most in zip(*(column.tolist() for column in columns), strict=True):
            end = known[row] - 1 if row in known else start + count
            if most and end + most < self._positions:
                rows.append(_HeadRow(row, start, end, states, row in known, most))
        return rows

    def _begin(self, spans: IntArray, chooses: NDArray[np.bool_], states: Tensor, fuses: bool = False) -> _HeadPass:
        """Begin a pass over `spans` of (row, start, count) from `states`, which are the target's if they are to be
        fused. A token is chosen for those that `chooses` names."""
        rows, starts, counts = spans.T
        batch = self._rows.batch(rows, starts, counts, self._rows.tokens[:, 1:])
        context = StepContext(batch, self.attention.begin_step(batch))
        own = rows[chooses]
        positions = (starts + counts)[chooses] + 1
        places = self._to((batch.first_places + counts - 1)[chooses])
        samples = SampledTokens(np.empty(len(own), np.int32), self._sampling(own, positions))
        step = HeadStep(context, states, fuses, places, samples)
        program = self._target.program
        run = None if program is None else self._head.begin_step(step, program.threads)
        if run is not None:
            return _HeadPass(DraftPass(run, samples.tokens), run.kept[0])
        head_states, logits = self._head.compute(step)
        tokens = self._head.target_ids[self._sample(logits, samples.sampling)].to(torch.int32)
        self._rows.store_tokens(own, positions, tokens)
        return _HeadPass(DraftPass(None, HostCopy(tokens)), head_states)

    def _to(self, places: LongArray) -> Tensor:
        return to_device(places, self._rows.device)
