"""Choosing tokens from logits: greedy, temperature, then top-k, top-p and min-p, every row by its own numbers.

One uniform number a row, never one a logit: on a CPU those would cost more than the model. Knows nothing of
sequences: a row's number is a function of its seed, choice and position.
"""

from collections.abc import Callable
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from ..cpu import library
from ..cpu.sampling import argmax, sample_tokens
from ..gpu import runtime
from ..step_batch import SamplingArray, as_signed64, to_device

GREEDY_BELOW = 1e-5
"""A temperature below this is greedy: ties aside, it cannot choose anything else."""

TOP_CANDIDATES = 256
"""Tokens looked at first for top-k, top-p and min-p; a row that needs more of them is sorted whole."""

_GOLDEN = 0x9E3779B97F4A7C15
_FIRST = 0xBF58476D1CE4E5B9
_SECOND = 0x94D049BB133111EB
"""These three are SplitMix64's constants."""


Sampler: TypeAlias = Callable[[Tensor, SamplingArray | None], Tensor]
"""Token ids int64 [S] for logits [S, vocabulary]; the likeliest of each row without sampling."""


def choose_sampler(device: torch.device) -> Sampler:
    """The fastest one for logits on `device`, for whoever is built there: no step looks for it."""
    if not runtime.serves(torch.float32, device):
        return sample
    from ..gpu.sampling import sample_rows

    return lambda logits, sampling: argmax(logits) if sampling is None else sample_rows(logits, sampling)


def sample(logits: Tensor, sampling: SamplingArray | None) -> Tensor:
    """The `Sampler` of a CPU, and by torch of any device."""
    if sampling is None:
        return argmax(logits)
    if library.supports(logits.dtype, logits.device):
        return sample_tokens(logits, sampling)
    greedy = (sampling["temperature"] < GREEDY_BELOW) | (sampling["top_k"] == 1)
    filtered = ~greedy & ((sampling["top_k"] > 0) | (sampling["top_p"] < 1) | (sampling["min_p"] > 0))
    tokens = argmax(logits)
    for kind, choose in ((~greedy & ~filtered, _temperature_only), (filtered, _filtered)):
        rows = np.flatnonzero(kind)
        if len(rows):
            at = to_device(rows, logits.device)
            tokens[at] = choose(logits[at].float(), sampling[rows])
    return tokens


def _temperature_only(logits: Tensor, sampling: SamplingArray) -> Tensor:
    """Temperature alone: the inverse of the cumulative distribution."""
    probabilities = _scale(logits, sampling).softmax(-1)
    return _invert_cumulative(probabilities, _uniform(sampling, logits.device))


def _filtered(logits: Tensor, sampling: SamplingArray) -> Tensor:
    """Top-k, then top-p of what is left, then min-p: among TOP_CANDIDATES where they suffice, else among all."""
    scaled = _scale(logits, sampling)
    tokens, enough = _sample_among(scaled, sampling, min(TOP_CANDIDATES, logits.shape[-1]))
    missed = (~enough).nonzero().squeeze(-1)  # a device without kernels is waited for here
    if len(missed):
        rest = sampling[missed.cpu().numpy()]
        tokens[missed] = _sample_among(scaled[missed], rest, logits.shape[-1])[0]
    return tokens


def _sample_among(scaled: Tensor, sampling: SamplingArray, candidates: int) -> tuple[Tensor, Tensor]:
    """A token for each row out of its most likely `candidates`, and whether those were enough to be exact."""
    limits = (to_device(sampling[name], scaled.device) for name in ("top_k", "top_p", "min_p"))
    top_k, top_p, min_p = (limit.unsqueeze(-1) for limit in limits)
    values, ids = scaled.topk(candidates)
    probabilities = (values - scaled.logsumexp(-1, keepdim=True)).exp()
    beyond = torch.arange(candidates, device=scaled.device) >= torch.where(top_k > 0, top_k, scaled.shape[-1])
    probabilities.masked_fill_(beyond, 0)
    cumulative = probabilities.cumsum(-1)
    mass = torch.where(top_k > 0, cumulative[:, -1:], 1.0)
    # A token stays while the tokens before it do not reach top_p.
    least = min_p * probabilities[:, :1]
    left_out = (cumulative - probabilities >= top_p * mass) | (probabilities < least)
    left_out[:, 0] = False
    chosen = probabilities.masked_fill(left_out, 0)
    enough = torch.where(top_k > 0, top_k <= candidates, cumulative[:, -1:] >= top_p)
    enough |= (probabilities[:, -1:] < least) & ((top_k == 0) | (top_p >= 1))
    index = _invert_cumulative(chosen, _uniform(sampling, scaled.device))
    return ids.gather(-1, index.unsqueeze(-1)).squeeze(-1), enough.squeeze(-1)


def _scale(logits: Tensor, sampling: SamplingArray) -> Tensor:
    """Logits over temperature, the largest moved to 0 first so that a small temperature cannot overflow."""
    temperature = to_device(sampling["temperature"], logits.device).unsqueeze(-1)
    return (logits - logits.amax(-1, keepdim=True)) / temperature


def _invert_cumulative(weights: Tensor, uniform: Tensor) -> Tensor:
    """The first index at which the cumulative sum of `weights` [S, n] reaches the share `uniform` [S] of the whole, a
    positive one: its weight is above 0. Weights that are no numbers (a model that overflows its dtype) still give an
    index that exists."""
    cumulative = weights.cumsum(-1)
    share = (uniform.unsqueeze(-1) * cumulative[:, -1:]).to(cumulative.dtype)
    share.clamp_(min=torch.finfo(share.dtype).tiny)
    return torch.searchsorted(cumulative, share).squeeze(-1).clamp_(max=weights.shape[-1] - 1)


def _uniform(sampling: SamplingArray, device: torch.device) -> Tensor:
    return counter_uniform(*(to_device(sampling[name], device) for name in ("seed", "choice", "position")))


def counter_uniform(seeds: Tensor, choices: Tensor, positions: Tensor) -> Tensor:
    """float64 [S] strictly between 0 and 1, one for each (seed, choice, position); all int64 [S]. A function of
    counters, without generator or state, and so the same on every device: SplitMix64's finaliser (Steele, Lea, Flood:
    Fast splittable pseudorandom number generators, 2014) over int64 tensors, whose arithmetic wraps as unsigned 64-bit
    arithmetic does."""
    state = _mix(seeds + as_signed64(_GOLDEN))
    state = _mix(state + choices * as_signed64(_GOLDEN))
    state = _mix(state + positions * as_signed64(_GOLDEN))
    # 52 bits and a half: exact in float64, and never 0 or 1.
    return (_shift(state, 12).double() + 0.5) * 2.0**-52


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * as_signed64(_FIRST)
    z = (z ^ _shift(z, 27)) * as_signed64(_SECOND)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
