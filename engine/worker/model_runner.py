"""One rank's computation of steps, in order: rows, cache, the machine that computes, and what drafts beside it. Knows
nothing of processes."""

from collections import Counter, deque
from collections.abc import Sequence
from itertools import compress
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from ...core.eager_reason import EagerReason
from ...core.logprobs import Logprobs
from ...scheduler.plan import IntArray, MaskSource, StepPlan, StepResult
from ..attention.backend import AttentionBackend
from ..attention.host_cache import HostCache
from ..gpu.graphs import StepGraphs
from .rank_places import RankPlaces
from .row_states import RowStates, StepInputs
from .step_computer import BegunStep, StepComputer
from .step_drafter import StepDrafter
from .step_samples import NO_TOKENS, StepSamples


class _RunnerStep:
    """A plan and its progress."""

    def __init__(self, plan: StepPlan, masks: MaskSource | None) -> None:
        self.plan = plan
        self.masks = masks
        """Makes the masks of its masked rows; None: it has no such rows."""
        self.inputs: StepInputs | None = None
        """Gathered as soon as rows may change."""
        self.begun: BegunStep | None = None
        self.error: Exception | None = None
        """Raised when the step's result is asked for."""

    def abandon(self) -> None:
        if self.begun is not None:
            self.begun.abandon()


class ModelRunner:
    """Has a `StepComputer` compute plans strictly in order; for one thread.

    A step begins as soon as the step before it is computed and its tokens are chosen; everything else of it is prepared
    by then. `draft`: what proposes tokens where plans say so.
    """

    def __init__(self, computer: StepComputer, rows: RowStates, draft: StepDrafter | None = None) -> None:
        self.computer = computer
        self.draft = draft
        self._rows = rows
        self._steps: deque[_RunnerStep] = deque()
        self.host_blocks: HostCache | None = None
        """What makes room; None where there are no blocks, or `host_states`, no states."""
        self.host_states: HostCache | None = None

    @property
    def places(self) -> RankPlaces:
        """The places of its cache, once it is allocated."""
        hosts = self.host_blocks, self.host_states
        return RankPlaces(*(None if host is None else host.images for host in hosts))

    def allocate(self, blocks: int, host_blocks: int = 0, snapshots: int = 0, host_snapshots: int = 0) -> None:
        """Make a cache of `blocks` blocks and `snapshots` of states, with `host_blocks` and `host_snapshots` in the
        host's memory, and begin anew: rows refer to the cache they were filled with."""
        self._forget_graphs()
        self._rows.clear()
        for attention in self.attentions:
            attention.allocate(blocks)
        self.computer.stores.allocate(snapshots)
        if self.draft is not None:
            self.draft.forget(blocks)
        views = [view for attention in self.attentions for view in attention.device_blocks]
        self.host_blocks = HostCache(views, host_blocks) if views else None
        states = self.computer.stores.states
        snapshot_views = [] if states is None else states.snapshots
        self.host_states = HostCache(snapshot_views, host_snapshots) if snapshots and snapshot_views else None

    def free_cache(self) -> None:
        """Give back what blocks, and states of rows and snapshots, take; no step may follow before `allocate`."""
        for attention in self.attentions:
            attention.allocate(0)
        self.computer.stores.free()

    @property
    def attentions(self) -> list[AttentionBackend]:
        """The caches that have the same blocks: that of the computer, and that of what drafts."""
        drafting = [] if self.draft is None else [self.draft.attention]
        return [self.computer.attention, *drafting]

    @property
    def all_graphs(self) -> list[StepGraphs]:
        """The graphs of the computer, and of the model that drafts."""
        recorded = self.computer.graphs, None if self.draft is None else self.draft.graphs
        return [graphs for graphs in recorded if graphs is not None]

    @property
    def eager_steps(self) -> Counter[EagerReason]:
        """See `EngineTotals.eager_steps`."""
        return sum((graphs.eager_steps for graphs in self.all_graphs), Counter(self.computer.eager_steps))

    @property
    def failed_captures(self) -> int:
        return sum(graphs.failed_captures for graphs in self.all_graphs)

    def capture_next_usual(self) -> float:
        """Capture the next usual graph of the computer's, or of the drafting model's; returns the fraction of theirs
        that is captured, 1.0 where nothing is left to do."""
        tables = self.all_graphs
        for before, graphs in enumerate(tables):
            if (share := graphs.capture_next_usual()) < 1.0:
                return (before + share) / len(tables)
        return 1.0

    def capture_one(self) -> bool:
        """Capture a missing graph, for an idle engine; False: none is missing, or it is too soon after a failure."""
        return any(graphs.capture_one() for graphs in self.all_graphs)

    @torch.inference_mode()
    def store_remote_tokens(self, rows: IntArray, positions: IntArray, tokens: IntArray) -> None:
        """Keep `tokens` [S], sampled by the last stage, at `positions` [S] of `rows` [S], before the next plan that
        needs them. On a stage that sampled them itself this changes nothing."""
        self._rows.store_tokens(rows, positions, torch.from_numpy(np.ascontiguousarray(tokens)))

    def run_step(self, plan: StepPlan, masks: MaskSource | None = None) -> StepResult:
        """Compute `plan`'s tokens; on the last stage, sample where it says so and keep the samples in their rows. The
        other stages' results are empty. `masks` makes those of `plan.masked`, and is called when all that can be
        computed without them has begun."""
        self.begin_step(plan, masks)
        return self.finish_step()

    @torch.inference_mode()
    def begin_step(self, plan: StepPlan, masks: MaskSource | None = None) -> None:
        if len(plan.masked) and masks is None:
            raise ValueError(f"step {plan.step} needs masks")
        self._steps.append(_RunnerStep(plan, masks if len(plan.masked) else None))
        self._begin_steps()

    @torch.inference_mode()
    def finish_step(self) -> StepResult:
        """The result of the oldest plan that was begun; the error that computing it raised."""
        step = self._steps[0]
        try:
            if step.error is not None:
                raise step.error
            assert step.begun is not None  # no step is before it
            step.begun.settle()
            if self.draft is not None and len(step.plan.proposals):
                result = self._read(step)
                return result._replace(proposals=self.draft.propose(step.plan, result))
        finally:
            step.abandon()
            self._steps.popleft()
            self._begin_steps()
        return self._read(step)  # while the next step is computed

    @property
    def has_step_to_begin(self) -> bool:
        """Whether a step waits for the result of one before."""
        return any(step.begun is None and step.error is None for step in self._steps)

    @torch.inference_mode()
    def make_copies(self, blocks: IntArray, states: IntArray) -> None:
        """Make copies between the cache and the host's memory, when no step is computed."""
        if self.draft is not None:
            self.draft.follow_copies(blocks)
        self._make_copies(blocks, states)

    def _make_copies(self, blocks: IntArray, states: IntArray) -> None:
        if self.host_blocks is not None and len(blocks):
            self.host_blocks.make_copies(blocks)
        if self.host_states is not None and len(states):
            self.host_states.make_copies(states)

    def close(self) -> None:
        """Forget steps that were begun, when none is computed any more, and recorded ones."""
        for step in self._steps:
            step.abandon()
        self.computer.decoder.close()
        if self.draft is not None:
            self.draft.model.close()
        self._steps.clear()
        self._forget_graphs()

    def _forget_graphs(self) -> None:
        for graphs in self.all_graphs:
            graphs.forget()

    def _begin_steps(self) -> None:
        """Prepare and begin every step that can be: the oldest one, and one after the other while the host need not
        choose tokens, or move rows, in between."""
        before: _RunnerStep | None = None
        for step in self._steps:
            if step.begun is None and step.error is None:
                try:
                    if not self._begin(step, before):
                        return
                except Exception as error:
                    step.error = error
            before = step

    def _begin(self, step: _RunnerStep, before: _RunnerStep | None) -> bool:
        """Prepare a step and begin it behind the one `before`; False: it has to wait for that one's result."""
        if step.inputs is None:
            room = self._rows.has_room_for(step.plan)
            if before is not None and (before.begun is None or not room):
                return False
            if not room:
                self._forget_graphs()
            self._rows.apply_plan(step.plan)
            if self.draft is not None:
                self.draft.apply_plan(step.plan)
            step.inputs = self._rows.gather_inputs(step.plan)
        if before is not None:
            if before.begun is None or not before.begun.tokens_follow:
                return False
            if not self.computer.follows_unread(step.plan):
                return False
            before.begun.make_masks()  # to begin a step may mean to wait for the one before
        self._make_copies(step.plan.block_copies, step.plan.state_copies)
        step.begun = self.computer.begin(step.plan, step.inputs, step.masks)
        return True

    def _read(self, step: _RunnerStep) -> StepResult:
        """The result of a settled step."""
        plan = step.plan
        inputs = step.inputs
        assert step.begun is not None
        assert inputs is not None
        samples = step.begun.read()
        if samples is None:
            return StepResult(plan.step, NO_TOKENS, NO_TOKENS, NO_TOKENS, NO_TOKENS)
        return _step_result(plan, inputs, samples)


def _step_result(plan: StepPlan, inputs: StepInputs, samples: StepSamples) -> StepResult:
    """The result of a step with these samples; of those at drafts, the ones that count."""
    if not len(plan.drafts):
        return StepResult(plan.step, inputs.rows, inputs.positions, np.ones_like(inputs.rows), *samples)
    rows, offsets, counts, kept = verify_samples(plan, samples.tokens)
    logprobs: Sequence[Logprobs | None] = [*compress(samples.logprobs, kept.tolist())]
    return StepResult(plan.step, rows, offsets, counts, samples.tokens[kept], logprobs, samples.prompt_logprobs)


class VerifiedSamples(NamedTuple):
    """Rows that were sampled, the position of the first token of each, how many there are, and which of all S samples
    they are."""

    rows: IntArray
    offsets: IntArray
    counts: IntArray
    kept: NDArray[np.bool_]


def verify_samples(plan: StepPlan, tokens: IntArray) -> VerifiedSamples:
    """Hold the samples of a plan with drafts, int32 [S] row after row, against them."""
    # Of few numbers Python's lists are compared sooner than numpy's arrays, and of many hardly later.
    sampled = tokens.tolist()
    drafted = plan.drafted.tolist()
    counts = list[int]()
    kept = list[bool]()
    first = draft = 0
    for length in plan.drafts[plan.samples].tolist():
        right = 0
        while right < length and sampled[first + right] == drafted[draft + right]:
            right += 1
        counts.append(right + 1)
        kept += [True] * (right + 1) + [False] * (length - right)
        first = first + length + 1
        draft = draft + length
    offsets = (plan.starts + plan.counts - plan.drafts)[plan.samples]
    return VerifiedSamples(plan.rows[plan.samples], offsets, np.array(counts, np.int32), np.array(kept, np.bool_))
