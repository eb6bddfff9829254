"""One rank's computation of a step: rows, model, attention, sampler. Knows nothing of threads or processes."""

import numpy as np
import torch

from ..scheduler.plan import IntArray, StepPlan, StepResult
from .attention.base import Attention
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
    def step(self, plan: StepPlan) -> StepResult:
        """Compute `plan`'s tokens, sample where it says so, and keep the samples in their rows."""
        self._rows.update(plan)
        if len(plan.copies):
            self._attention.copy(torch.from_numpy(plan.copies.astype(np.int64)).to(self._device))
        if not len(plan.rows):
            return _result(plan, np.zeros(0, np.int32))
        inputs = self._rows.inputs(plan)
        positions, attend = inputs.batch.positions, self._attention.begin(inputs.batch)
        logits = self._model.logits(inputs.tokens, positions, attend, inputs.last)
        if not len(inputs.rows):
            return _result(plan, np.zeros(0, np.int32))
        return _result(plan, self._sample(inputs, logits))

    def _sample(self, inputs: Inputs, logits: torch.Tensor) -> IntArray:
        tokens = sample(logits, inputs.choices)
        self._rows.write(inputs, tokens)
        return tokens.to(torch.int32).cpu().numpy()


def _result(plan: StepPlan, tokens: IntArray) -> StepResult:
    sampled = plan.samples
    rows = plan.rows[sampled]
    return StepResult(plan.step, rows, (plan.starts + plan.counts)[sampled], np.ones_like(rows), tokens)
