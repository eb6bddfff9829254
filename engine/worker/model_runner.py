"""One rank's computation of a step: rows, model, attention, sampler. Knows nothing of processes."""

from collections import deque
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...core.logprobs import Logprobs
from ...scheduler.plan import IntArray, StepPlan, StepResult
from ..attention.backend import AttentionBackend
from ..layers.step_context import StepContext
from ..models.interfaces import Decoder, LogitsIterator, PendingStep
from .logprobs import top_logprobs
from .row_states import RowStates, StepInputs
from .sampler import sample

_NONE: IntArray = np.zeros(0, np.int32)


class _RunnerStep:
    """A plan, and how far it is: `inputs` once it began; `running` while it is computed beside us, `picked` what it
    then chooses by itself; once it is `computed` otherwise, `sampled` what was chosen from the first of the `logits`,
    in which what scores prompts follows. A stage that is not the last has none."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan
        self.begun = False
        self.inputs: StepInputs | None = None
        self.running: PendingStep | None = None
        self.picked: IntArray | None = None
        self.computed = False
        self.logits: LogitsIterator | None = None
        self.sampled: _SampledStep | None = None
        self.error: Exception | None = None

    @property
    def chosen(self) -> bool:
        """Whether its tokens are there, or will be when the device comes to the next step."""
        return self.begun and self.error is None and (self.picked is not None or self.logits is not None)


class _SampledStep(NamedTuple):
    """Token ids [S], and the logits [S, vocabulary] that they were chosen from."""

    tokens: Tensor
    logits: Tensor


class ModelRunner:
    """Computes plans strictly in order; for one thread.

    A step that our kernels compute, and whose tokens are chosen from the logits as they are, needs nobody's time: the
    next one can begin when it is done. Others are computed, or chosen, when the caller wants their results.
    """

    def __init__(self, decoder: Decoder, attention: AttentionBackend, rows: RowStates, device: torch.device) -> None:
        self.decoder, self._attention, self._rows, self._device = decoder, attention, rows, device
        self._steps: deque[_RunnerStep] = deque()

    def allocate(self, blocks: int) -> None:
        """Make a cache of `blocks` blocks and begin anew: rows refer to the cache they were filled with."""
        self._rows.clear()
        self._attention.allocate(blocks)

    @torch.inference_mode()
    def store_remote_tokens(self, rows: IntArray, positions: IntArray, tokens: IntArray) -> None:
        """Keep `tokens` [S] at `positions` [S] of `rows` [S]: so hear stages that choose none of those chosen, before
        the next plan after they were. Told to a stage that chose them, it changes nothing."""
        self._rows.store_remote_tokens(rows, positions, tokens)

    def run_step(self, plan: StepPlan) -> StepResult:
        """Compute `plan`'s tokens; on the last stage, sample where it says so and keep the samples in their rows. The
        other stages' results are empty."""
        self.begin_step(plan)
        return self.finish_step()

    def begin_step(self, plan: StepPlan) -> None:
        """Have `plan` computed after those begun before."""
        self._steps.append(_RunnerStep(plan))
        self._advance()

    def finish_step(self) -> StepResult:
        """The result of the oldest plan that was begun; what computing it raised."""
        step = self._steps[0]
        try:
            return self._finish(step)
        finally:
            self._steps.popleft()
            self._advance()

    def close(self) -> None:
        """Forget what was begun, when nobody computes it any more."""
        self.decoder.close()
        self._steps.clear()

    @torch.inference_mode()
    def _advance(self) -> None:
        """Begin what can begin: the oldest step, and one that can follow another that is not done."""
        for before, step in pairwise((None, *self._steps)):
            if step is None or step.begun:
                continue
            if before is not None and not self._can_follow(before, step.plan):
                return
            step.begun = True
            try:
                self._begin(step)
            except Exception as error:
                step.error = error  # told when the step's result is asked for

    def _can_follow(self, before: _RunnerStep, plan: StepPlan) -> bool:
        """Whether `plan` can begin while the step `before` it is computed: whose tokens are chosen when it is done, and
        from under which nothing is moved."""
        return before.chosen and self._rows.has_room_for(plan)

    def _begin(self, step: _RunnerStep) -> None:
        plan = step.plan
        self._rows.apply_plan(plan)
        if not len(plan.rows):
            return
        step.inputs = inputs = self._rows.gather_inputs(plan)
        if self._device.type != "cpu":
            self._compute(step, inputs)  # which is queued on the device
        elif len(inputs.rows) and inputs.prompt_logprobs is None:
            picks = inputs.sampled_tokens()
            step.running = self.decoder.begin_step(self._context(inputs), inputs.sample_places, picks)
            step.picked = None if step.running is None or picks is None else picks.tokens

    def _finish(self, step: _RunnerStep) -> StepResult:
        if step.error is not None:
            raise step.error
        if step.inputs is None:
            return _empty_result(step.plan)
        if step.running is not None:
            step.running.finish()
        if step.picked is not None:
            return _result(step.plan, step.inputs, step.picked)
        return self._read(step, step.inputs)

    @torch.inference_mode()
    def _compute(self, step: _RunnerStep, inputs: StepInputs) -> None:
        """Logits and tokens on the device; nothing of them on the stages before the last."""
        step.computed = True
        step.logits = self._logits(inputs) if step.running is None else iter((step.running.logits,))
        if step.logits is not None and len(inputs.rows):
            logits = next(step.logits)
            tokens = self._choose(inputs, logits)
            self._rows.store_sampled(inputs, tokens)
            step.sampled = _SampledStep(tokens, logits)

    @torch.inference_mode()
    def _read(self, step: _RunnerStep, inputs: StepInputs) -> StepResult:
        """What the host wants to know of it."""
        if not step.computed:
            self._compute(step, inputs)
        result = _empty_result(step.plan)
        if step.logits is None:
            return result
        if step.sampled is not None:
            tokens, logits = step.sampled
            logprobs = top_logprobs(logits, tokens, inputs.logprobs)
            result = _result(step.plan, inputs, tokens.to(torch.int32).cpu().numpy(), logprobs)
        return (
            result
            if inputs.prompt_logprobs is None
            else result._replace(prompt_logprobs=inputs.prompt_logprobs.read_logits(step.logits))
        )

    def _logits(self, inputs: StepInputs) -> LogitsIterator | None:
        """Those of the rows that are sampled, if any, then piece by piece those that score prompts."""
        sampled = (inputs.sample_places,) if len(inputs.rows) else ()
        scored = () if inputs.prompt_logprobs is None else inputs.prompt_logprobs.place_pieces
        return self.decoder.compute_logits(self._context(inputs), (*sampled, *scored))

    def _context(self, inputs: StepInputs) -> StepContext:
        return StepContext(inputs.batch, self._attention.begin_step(inputs.batch))

    def _choose(self, inputs: StepInputs, logits: Tensor) -> Tensor:
        """Token ids [S]. Logits that rows want changed are changed in a copy: the others pay nothing for them."""
        if not len(inputs.processed):
            return sample(logits, inputs.sampling)
        at = torch.from_numpy(inputs.processed).to(self._device)
        changed = logits[at].float()
        self._rows.process_logits(inputs, changed)
        theirs = sample(changed, None if inputs.sampling is None else inputs.sampling[inputs.processed])
        if len(inputs.processed) == len(logits):
            return theirs
        return sample(logits, inputs.sampling).index_copy(0, at, theirs)


def _empty_result(plan: StepPlan) -> StepResult:
    return StepResult(plan.step, _NONE, _NONE, _NONE, _NONE)


def _result(
    plan: StepPlan, inputs: StepInputs, tokens: IntArray, logprobs: tuple[Logprobs | None, ...] = ()
) -> StepResult:
    return StepResult(plan.step, inputs.rows, inputs.positions, np.ones_like(inputs.rows), tokens, logprobs)
