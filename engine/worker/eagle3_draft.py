"""An EAGLE-3 head beside the target: it goes on from each step's hidden states, with a cache of the same blocks."""

from itertools import compress
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...scheduler.plan import IntArray, LongArray, Proposals, StepPlan, StepResult, proposals_of
from ..attention.backend import AttentionBackend
from ..layers.step_context import StepContext
from ..models.eagle3 import Eagle3Head
from ..models.native_decoder import NativeDecoder
from .row_states import RowStates
from .sampler import sample


class _HeadRow(NamedTuple):
    """A row of a step: places `first` to `end` are computed with the head, from the target's states that begin at the
    packed place `states`; a row that was `sampled` gets `most` proposals then."""

    row: int
    first: int
    end: int
    states: int
    sampled: bool
    most: int


class Eagle3Draft:
    """A head, for one thread: tokens and block tables are the target's `rows`. Its cache lacks the places of steps for
    which nothing was to be proposed: their hidden states are gone, and it attends to whatever is there. So it does at
    the last place of a prefix that another row computed, which was followed by that row's token. `positions`: the
    longest sequence."""

    def __init__(
        self,
        head: Eagle3Head,
        attention: AttentionBackend,
        target: NativeDecoder,
        rows: RowStates,
        positions: int,
        draws: bool = False,
    ) -> None:
        self._head, self._attention, self._target, self._rows = head, attention, target, rows
        self._positions, self._draws = positions, draws

    @property
    def block_bytes(self) -> int:
        return self._attention.block_bytes

    def allocate(self, blocks: int) -> None:
        self._attention.allocate(blocks)

    def apply_plan(self, plan: StepPlan) -> None:
        """See `StepDrafter.apply_plan`: it remembers nothing of rows."""

    def close(self) -> None:
        """It has no threads."""

    def propose(self, plan: StepPlan, result: StepResult) -> Proposals:
        """See `StepDrafter.propose`."""
        began = perf_counter()
        rows = self._rows_to_compute(plan, result)
        if not rows:
            return Proposals()
        wanted = np.concatenate([np.arange(each.states, each.states + each.end - each.first) for each in rows])
        going = np.array([(each.row, each.first, each.end - each.first) for each in rows], np.int32)
        states = self._advance(going, self._target.kept_states()[self._to(wanted)], fuse=True)
        ready = [each for each in rows if each.sampled]
        states = states[self._to(np.flatnonzero([each.sampled for each in rows]))]
        proposed: dict[int, list[int]] = {each.row: [] for each in ready}
        place = 0
        while ready:
            for each, token in zip(ready, self._choose(states, ready, place), strict=True):
                proposed[each.row].append(token)
            still = [each.most > place + 1 for each in ready]
            ready = [*compress(ready, still)]
            if ready:
                going = np.array([(each.row, each.end + place, 1) for each in ready], np.int32)
                states = self._advance(going, states[self._to(np.flatnonzero(still))])
            place += 1
        found = [(each.row, each.end + 1, proposed[each.row]) for each in rows if each.sampled]
        return proposals_of(found, perf_counter() - began, max(place, 1), len(wanted))

    def _rows_to_compute(self, plan: StepPlan, result: StepResult) -> list[_HeadRow]:
        known = dict(zip(result.rows.tolist(), (result.offsets + result.counts).tolist(), strict=True))
        columns = plan.rows, plan.starts, plan.counts, np.cumsum(plan.counts) - plan.counts, plan.proposals
        found = []
        for row, start, count, states, most in zip(*(each.tolist() for each in columns), strict=True):
            end = known[row] - 1 if row in known else start + count
            if most and end + most < self._positions:
                found.append(_HeadRow(row, start, end, states, row in known, most))
        return found

    def _advance(self, going: IntArray, states: Tensor, fuse: bool = False) -> Tensor:
        """Compute places of (row, start, count) from `states`, the target's to be fused or its own; the states [R,
        hidden] of the last place of each."""
        rows, starts, counts = going.T
        batch = self._rows.batch(rows, starts, counts)
        context = StepContext(batch, self._attention.begin_step(batch))
        following = self._rows.batch(rows, starts + 1, counts).tokens
        own = self._head(following, self._head.fuse(states, context) if fuse else states, context)
        return own[self._to(batch.first_places + batch.counts - 1)]

    def _choose(self, states: Tensor, ready: list[_HeadRow], place: int) -> list[int]:
        """The tokens that follow so many proposals of these rows, which are stored behind them."""
        rows = np.array([each.row for each in ready], np.int32)
        positions = np.array([each.end + 1 + place for each in ready], np.int32)
        sampling = self._rows.sampling_at(rows, positions) if self._draws else None
        tokens = self._head.target_ids(sample(self._head.logits(states), sampling)).to(torch.int32)
        self._rows.store_tokens(rows, positions, tokens)
        found: list[int] = tokens.tolist()
        return found

    def _to(self, places: LongArray) -> Tensor:
        return torch.from_numpy(places).to(self._rows.device)
