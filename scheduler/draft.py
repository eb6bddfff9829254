"""A step plan in the making: what the budget went to so far. Takes no blocks and decides nothing."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .cost import Work
from .plan import IntArray, NewSequence, StepPlan
from .rows import BoolArray, Rows

NO_COPIES: IntArray = np.zeros((0, 2), np.int32)


class Flight(NamedTuple):
    """A plan on its way: what to settle when its result arrives. `ends` [R]: scheduled after it. `work`: what it
    computes."""

    step: int
    rows: IntArray
    ends: IntArray
    samples: BoolArray
    work: Work


class Draft:
    """`counts` [rows]: tokens each row computes in this step, 0 for those outside; `left`: budget not spent.

    `grown`: rows whose tables grew. `short_of_blocks`: somebody waits for blocks, so nobody new comes in; and who
    is `new` left enough blocks for the others, so it is never preempted in the same step.
    """

    def __init__(self, rows: Rows, budget: int) -> None:
        self._rows = rows
        self.counts: IntArray = np.zeros(rows.size, np.int32)
        self.left = budget
        self.grown: list[int] = []
        self.new: list[int] = []
        self.short_of_blocks = False

    def add(self, rows: NDArray[np.int64] | int, counts: IntArray | int) -> None:
        self.counts[rows] = counts
        self.left -= int(np.sum(counts))

    def drop(self, row: int) -> None:
        """The row is not in this step after all."""
        self.left += int(self.counts[row])
        self.counts[row] = 0

    def end(self, row: int) -> int:
        """Tokens of the row scheduled after this step."""
        return int(self._rows.scheduled[row] + self.counts[row])

    def work(self) -> Work:
        """What it computes so far."""
        rows = self._rows
        chosen = np.flatnonzero(self.counts)
        counts, starts, decoding = self.counts[chosen], rows.scheduled[chosen], rows.caught_up[chosen]
        context = counts * (starts + counts // 2)
        tokens, attended = int(counts.sum()), int(context.sum())
        if decoding.all():
            return Work(tokens, attended)
        own, own_attended = int(counts[decoding].sum()), int(context[decoding].sum())
        return Work(own, own_attended, tokens - own, attended - own_attended)

    def launch(self, step: int, closed: list[int]) -> tuple[StepPlan, Flight] | None:
        """Write the step into the rows' counters; None when nothing runs (`closed` then waits for a plan that
        does)."""
        chosen = np.flatnonzero(self.counts).astype(np.int32)
        if not len(chosen):
            return None
        work = self.work()
        rows, counts = self._rows, self.counts[chosen]
        starts = rows.scheduled[chosen]
        ends = starts + counts
        samples = ends == rows.known[chosen] + rows.pending[chosen]
        new, appended = self._newcomers(), self._appended()
        self._schedule(chosen, ends, samples)
        leavers = np.array(closed, np.int32)
        plan = StepPlan(step, chosen, starts, counts, samples, appended, new, leavers, NO_COPIES)
        return plan, Flight(step, chosen, ends, samples, work)

    def _schedule(self, chosen: IntArray, ends: IntArray, samples: BoolArray) -> None:
        rows = self._rows
        rows.scheduled[chosen] = ends
        rows.pending[chosen] += samples
        rows.in_flight[chosen] += 1
        rows.caught_up[chosen] |= samples

    def _newcomers(self) -> tuple[NewSequence, ...]:
        return tuple(self._newcomer(row) for row in self.new)

    def _newcomer(self, row: int) -> NewSequence:
        sequence = self._rows.sequences[row]
        computed, prompt = int(self._rows.scheduled[row]), len(sequence.request.prompt)
        return NewSequence(row, sequence.tokens(), computed, sequence.sampling, prompt)

    def _appended(self) -> IntArray:
        owners: list[int] = []
        blocks: list[int] = []
        for row in self.grown:
            if self.counts[row]:
                fresh = self._rows.tables[row].blocks[self._rows.announced[row] :]
                self._rows.announced[row] += len(fresh)
                owners.extend([row] * len(fresh))
                blocks.extend(fresh)
        return np.array([owners, blocks], np.int32).T.copy()
