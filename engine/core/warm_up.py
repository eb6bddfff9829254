"""What an engine core computes before any request comes: whether the model computes numbers, and what steps cost."""

import math

import numpy as np

from ...core.errors import InvalidArgument
from ...core.logprobs import Logprobs
from ...core.resolved_sampling import ResolvedSampling
from ...scheduler.sequence import GREEDY, SequenceSpec
from .step_loop import EngineCore

WARM_UP_PROMPT_TOKENS, WARM_UP_NEW_TOKENS = 32, 3
"""The sequence that the warm-up computes to learn what steps cost."""

_WARM_UP_KEY = -1


def warm_up(core: EngineCore) -> None:
    """Generate a token as every request does, and then some more to learn what prompts and decoding cost.

    Raises:
        InvalidArgument: the model's log-probabilities are not finite.
    """
    if not all(math.isfinite(scores.chosen) for scores in _run(core, 1, 1, ResolvedSampling(logprobs=0))):
        raise InvalidArgument("the model computes no numbers: its weights are damaged, or overflow in this dtype")
    core.scheduler.reset_step_times()
    if core.scheduler.config.max_model_len >= WARM_UP_PROMPT_TOKENS + WARM_UP_NEW_TOKENS:
        _run(core, WARM_UP_PROMPT_TOKENS, WARM_UP_NEW_TOKENS)
    core.scheduler.reset_totals()


def learn_step_times(core: EngineCore) -> None:
    """Learn what steps cost from prompts of three sizes, as large as steps may be, computed twice: a GPU's kernels are
    compiled at first."""
    config = core.scheduler.config
    longest = min(config.max_num_batched_tokens, config.max_model_len - WARM_UP_NEW_TOKENS)
    if longest < WARM_UP_PROMPT_TOKENS:
        return
    for _ in range(2):
        core.scheduler.reset_step_times()
        for prompt in (longest // 16, longest // 4, longest):
            _run(core, max(prompt, 1), WARM_UP_NEW_TOKENS)
    core.scheduler.step_times.repeat_observations()
    core.scheduler.reset_totals()


def _run(core: EngineCore, prompt: int, new: int, sampling: ResolvedSampling = GREEDY) -> list[Logprobs]:
    """The logprobs of the new tokens, if `sampling` wants any."""
    tokens = np.zeros(prompt, np.int32)
    encoded = None if core.encoder is None else core.encoder.blank()
    spec = SequenceSpec(key=_WARM_UP_KEY, prompt=tokens, max_tokens=new, sampling=sampling, encoded=encoded)
    return [scores for updates in core.run_alone(spec) for scores in updates.logprobs if scores is not None]
