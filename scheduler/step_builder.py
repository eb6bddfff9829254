"""A step plan in the making: what the budget went to so far. Takes no blocks and decides nothing."""

from itertools import compress
from operator import mul

import numpy as np

from .in_flight import InFlightStep
from .plan import IntArray, NewSequence, StepPlan
from .rows import BoolArray, RowTable
from .step_time import StepWork

_NOBODY: IntArray = np.zeros(0, np.int32)
_NO_PAIRS: IntArray = np.zeros((0, 2), np.int32)


class StepBuilder:
    """`counts` [rows]: tokens each row computes in this step, 0 for those outside; `left`: budget not spent; `work`:
    what it computes so far. It begins with what decoding rows compute.

    `grown`: rows whose tables grew. `short_of_blocks`: somebody waits for blocks, so nobody new comes in; and who
    is `new` left enough blocks for the others, so it is never preempted in the same step.
    """

    def __init__(self, rows: RowTable, counts: IntArray, budget: int) -> None:
        self._rows = rows
        self.counts = counts
        # Few numbers are summed sooner as Python's: cold, one sum of numpy's takes 20 microseconds.
        decoding = counts.nonzero()[0]
        given, starts = counts[decoding].tolist(), rows.scheduled[decoding].tolist()
        tokens = sum(given)
        self.work = StepWork(tokens, sum(map(mul, given, starts)))
        self.budget_left = budget - tokens
        self.grown_rows: list[int] = []
        self.admitted_rows: list[int] = []
        self.short_of_blocks = False

    def add_prompt_chunk(self, row: int, count: int) -> None:
        """A chunk of a prompt."""
        self.counts[row] = count
        self._spend(row, 1)

    def remove_row(self, row: int) -> None:
        """The row is not in this step after all."""
        self._spend(row, -1)
        self.counts[row] = 0

    def _spend(self, row: int, sign: int) -> None:
        count, start = int(self.counts[row]), int(self._rows.scheduled[row])
        decoding, context, tokens, attended = self.work
        if row in self._rows.prefilling:
            tokens, attended = tokens + sign * count, attended + sign * count * (start + count // 2)
        else:
            decoding, context = decoding + sign * count, context + sign * count * start
        self.work = StepWork(decoding, context, tokens, attended)
        self.budget_left -= sign * count

    def end_after(self, row: int) -> int:
        """Tokens of the row scheduled after this step."""
        return int(self._rows.scheduled[row] + self.counts[row])

    @property
    def rows_lacking_blocks(self) -> list[int]:
        """Rows that have no blocks yet for all that they compute, the most senior first."""
        rows = self._rows
        return rows.by_seniority((rows.scheduled + self.counts > rows.capacity).nonzero()[0])

    def finish_plan(self, step: int, closed: list[int]) -> tuple[StepPlan, InFlightStep] | None:
        """Write the step into the rows' counters; None when nothing runs (`closed` then waits for a plan that
        does)."""
        chosen = self.counts.nonzero()[0]
        if not len(chosen):
            return None
        rows, counts = self._rows, self.counts[chosen]
        starts, expected = rows.scheduled[chosen], rows.expected[chosen]
        ends = starts + counts
        samples: BoolArray = ends == expected
        new, appended = self._newcomers(), self._appended()
        rows.scheduled[chosen], rows.expected[chosen] = ends, expected + samples
        sampling = list(compress(chosen.tolist(), samples.tolist()))
        for row in rows.prefilling.intersection(sampling) if rows.prefilling else ():
            rows.start_decoding(row)
        leavers = np.array(closed, np.int32) if closed else _NOBODY
        plan = StepPlan(step, chosen.astype(np.int32), starts, counts, samples, appended, new, leavers)
        return plan, InFlightStep(step, chosen, ends, sampling, self.work)

    def _newcomers(self) -> tuple[NewSequence, ...]:
        return tuple([self._newcomer(row) for row in self.admitted_rows])

    def _newcomer(self, row: int) -> NewSequence:
        sequence = self._rows.sequences[row]
        computed, prompt = int(self._rows.scheduled[row]), len(sequence.request.prompt)
        return NewSequence(row, sequence.known_tokens(), computed, sequence.sampling, prompt)

    def _appended(self) -> IntArray:
        pairs: list[tuple[int, int]] = []
        for row in self.grown_rows:
            if self.counts[row]:
                fresh = self._rows.tables[row].blocks[self._rows.announced_blocks[row] :]
                self._rows.announced_blocks[row] += len(fresh)
                pairs.extend((row, block) for block in fresh)
        return np.array(pairs, np.int32) if pairs else _NO_PAIRS
