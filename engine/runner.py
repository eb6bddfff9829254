"""One rank's computation of a step: rows, model, attention, sampler. Knows nothing of threads or processes."""

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from ..core.logprobs import Logprobs
from ..scheduler.plan import IntArray, StepPlan, StepResult
from .attention.base import Attention
from .logprobs import top_logprobs
from .models.base import Decoder
from .rows import Inputs, Rows
from .sampling import sample


class Runner:
    """Computes plans strictly in order."""

    def __init__(self, model: Decoder, attention: Attention, rows: Rows, device: torch.device) -> None:
        self._model, self._attention, self._rows, self._device = model, attention, rows, device

    def allocate(self, blocks: int) -> None:
        """Make a cache of `blocks` blocks and begin anew: rows refer to the cache they were filled with."""
        self._rows.clear()
        self._attention.allocate(blocks)

    @torch.inference_mode()
    def learn(self, rows: IntArray, positions: IntArray, tokens: IntArray) -> None:
        """Keep `tokens` [S] at `positions` [S] of `rows` [S]: so hear stages that choose none of those chosen, before
        the next plan after they were. Told to a stage that chose them, it changes nothing."""
        self._rows.learn(rows, positions, tokens)

    @torch.inference_mode()
    def step(self, plan: StepPlan) -> StepResult:
        """Compute `plan`'s tokens; on the last stage, sample where it says so and keep the samples in their rows. The
        other stages' results are empty."""
        self._rows.update(plan)
        if len(plan.copies):
            self._attention.copy(torch.from_numpy(plan.copies.astype(np.int64)).to(self._device))
        if not len(plan.rows):
            return _nothing(plan)
        inputs = self._rows.inputs(plan)
        logits = self._logits(inputs)
        if logits is None:
            return _nothing(plan)
        result = self._sampled(plan, inputs, next(logits)) if len(inputs.rows) else _nothing(plan)
        return result if inputs.scored is None else result._replace(scores=inputs.scored.read(logits))

    def _logits(self, inputs: Inputs) -> Iterator[Tensor] | None:
        """Those of the rows that are sampled, if any, then piece by piece those that score prompts."""
        sampled = (inputs.last,) if len(inputs.rows) else ()
        scored = () if inputs.scored is None else inputs.scored.pieces
        return self._model.logits(inputs.batch, self._attention.begin(inputs.batch), (*sampled, *scored))

    def _sampled(self, plan: StepPlan, inputs: Inputs, logits: Tensor) -> StepResult:
        tokens = self._choose(inputs, logits)
        self._rows.write(inputs, tokens)
        logprobs = top_logprobs(logits, tokens, inputs.logprobs)
        return _result(plan, inputs, tokens.to(torch.int32).cpu().numpy(), logprobs)

    def _choose(self, inputs: Inputs, logits: Tensor) -> Tensor:
        """Token ids [S]. Logits that rows want changed are changed in a copy: the others pay nothing for them."""
        if not len(inputs.shaped):
            return sample(logits, inputs.choices)
        at = torch.from_numpy(inputs.shaped).to(self._device)
        changed = logits[at].float()
        self._rows.shape(inputs, changed)
        theirs = sample(changed, None if inputs.choices is None else inputs.choices[inputs.shaped])
        if len(inputs.shaped) == len(logits):
            return theirs
        return sample(logits, inputs.choices).index_copy(0, at, theirs)


def _nothing(plan: StepPlan) -> StepResult:
    none = np.zeros(0, np.int32)
    return StepResult(plan.step, none, none, none, none)


def _result(plan: StepPlan, inputs: Inputs, tokens: IntArray, logprobs: tuple[Logprobs | None, ...]) -> StepResult:
    return StepResult(plan.step, inputs.rows, inputs.positions, np.ones_like(inputs.rows), tokens, logprobs)
