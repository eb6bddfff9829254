"""A step whose content is chosen: written into its rows' counters, and as the plan of executors. Chooses nothing."""

from collections.abc import Iterable, Mapping
from itertools import chain, compress

import numpy as np

from .plan import NO_HOST_COPIES, NO_ROWS, NO_TOKENS, IntArray, LongArray, StepPlan, StepWork
from .running_set import BoolArray, InFlightStep, RunningSet
from .states.kept_states import NO_STATES

_NO_PAIRS: IntArray = np.zeros((0, 2), np.int32)


class PackedStep:
    """Step number `step`: `counts` tokens of each row, of which R have any, some of them `drafts` to verify, by row."""

    def __init__(
        self,
        running: RunningSet,
        step: int,
        work: StepWork,
        counts: IntArray,
        drafts: Mapping[int, list[int]],
    ) -> None:
        self._running = running
        self._step = step
        self._work = work
        self._counts = counts
        self._drafts = drafts
        self.rows: LongArray = counts.nonzero()[0]
        """[R]"""
        rows = self.rows
        self._starts = running.scheduled[rows]
        self.ends: IntArray = self._starts + counts[rows]
        """[R] tokens of each row that are scheduled after it."""
        self._num_drafts = NO_ROWS
        expected = running.expected[rows]
        if drafts:
            self._num_drafts = np.array([len(drafts.get(row, ())) for row in rows.tolist()], np.int32)
            expected = expected + self._num_drafts
        self.samples: BoolArray = self.ends == expected
        """[R] which rows get a token."""
        self._expected = expected

    def write(self, admitted: Iterable[int], proposals: IntArray) -> tuple[StepPlan, InFlightStep]:
        """Count the step as scheduled. `admitted` rows are new with it; a draft model makes `proposals` [R] tokens, or
        none for anybody. Rows get their blocks also where the step leaves them out: no later plan has these again."""
        running, rows, samples = self._running, self.rows, self.samples
        appended, running.appended = running.appended, []
        num_logits = self._num_logits()
        new = tuple([running.new_sequence(row) for row in admitted])
        running.scheduled[rows], running.expected[rows] = self.ends, self._expected + samples
        sampled = list(compress(rows.tolist(), samples.tolist()))
        drafted = {row: self._drafts[row] for row in sampled if row in self._drafts} if self._drafts else {}
        for row in running.prefilling.intersection(sampled) if running.prefilling else ():
            running.prefilling.remove(row)
            running.decode_limit[row] = running.token_limit[row] - 1
        states = NO_STATES
        if running.states is not None:
            states = running.states.plan_step(rows, running.scheduled, self._counts, drafted)
        block_copies, state_copies = running.cache.take_block_copies(), running.cache.take_state_copies()
        plan = StepPlan(
            self._step,
            rows.astype(np.int32),
            self._starts,
            self._counts[rows],
            samples,
            num_logits,
            np.array(appended, np.int32) if appended else _NO_PAIRS,
            new,
            closed=np.array(running.closed_rows, np.int32) if running.closed_rows else NO_ROWS,
            forced=running.constrained.take_forced() if running.constrained.keys else NO_TOKENS,
            proposals=proposals,
            block_copies=np.array(block_copies, np.int32) if block_copies else NO_HOST_COPIES,
            state_saves=states.saves,
            state_restores=states.restores,
            state_copies=np.array(state_copies, np.int32) if state_copies else NO_HOST_COPIES,
        )
        running.closed_rows.clear()
        if not drafted:
            return plan, InFlightStep(self._step, rows, self.ends, sampled, self._work, saves=states.snapshots)
        plan = plan._replace(drafts=self._num_drafts, drafted=np.array([*chain(*drafted.values())], np.int32))
        sampled = [row for row in sampled for _ in range(1 + len(drafted.get(row, ())))]
        lengths = {row: len(tokens) for row, tokens in drafted.items()}
        return plan, InFlightStep(self._step, rows, self.ends, sampled, self._work, lengths, states.snapshots)

    def _num_logits(self) -> IntArray:
        """[R] places of each row whose logits are wanted."""
        running = self._running
        num_logits = self.samples.astype(np.int32)
        if self._drafts:
            num_logits += self._num_drafts
        for row in running.scoring:  # all places of a chunk that is followed by prompt tokens to be scored
            if self._counts[row] and running.scheduled[row] < len(running.sequences[row].spec.prompt) - 1:
                num_logits[np.searchsorted(self.rows, row)] = self._counts[row]
        return num_logits
