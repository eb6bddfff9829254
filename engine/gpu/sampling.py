"""Draws tokens on a GPU by temperature, top-k, top-p and min-p: exactly, without sorting and without the host.

A token's key is the bits of the float that says how many halvings it is less likely than the likeliest. Eight passes of
16 keys find that up to which tokens reach a count or a weight. The reference is `worker.sampler`.
"""

from collections.abc import Iterator

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..step_batch import SAMPLING_DTYPE, SamplingArray, to_device
from .runtime import TRITON_TYPES, Specialisation

GREEDY_BELOW = 1e-5
"""`sampler.GREEDY_BELOW`."""

_BLOCK, _WARPS = 1024, 8
_WORDS = {name: SAMPLING_DTYPE.fields[name][1] // 4 for name in SAMPLING_DTYPE.names or ()}  # type: ignore[index]
_ROW_WORDS = tl.constexpr(SAMPLING_DTYPE.itemsize // 4)
_TEMPERATURE, _TOP_P, _MIN_P = (tl.constexpr(_WORDS[name]) for name in ("temperature", "top_p", "min_p"))
_TOP_K, _SEED, _CHOICE, _POSITION = (
    tl.constexpr(_WORDS[name] // 2) for name in ("top_k", "seed", "choice", "position")
)
"""Offsets of a row's numbers, in words of their own sizes."""

_KEYS = tl.constexpr(16)
"""Keys of one pass."""

_LOG2_E = tl.constexpr(1.4426950408889634)
_LEAST_GREEDY = tl.constexpr(GREEDY_BELOW)
_FARTHEST, _FARTHEST_KEY = tl.constexpr(126.0), tl.constexpr(0x42FC0000)
"""Halvings beyond which a weight is no normal float, so that its token is never drawn; and their key."""


@triton.jit
def _mix(z):
    """SplitMix64's finaliser, as in `sampler.counter_uniform`."""
    z = (z ^ (z >> 30)) * tl.full((1,), 0xBF58476D1CE4E5B9, tl.uint64)
    z = (z ^ (z >> 27)) * tl.full((1,), 0x94D049BB133111EB, tl.uint64)
    return z ^ (z >> 31)


@triton.jit
def _uniform(seed, choice, position):
    """`sampler.counter_uniform`: float64 [1]."""
    golden = tl.full((1,), 0x9E3779B97F4A7C15, tl.uint64)
    state = _mix(seed.to(tl.uint64) + golden)
    state = _mix(state + choice.to(tl.uint64) * golden)
    state = _mix(state + position.to(tl.uint64) * golden)
    return ((state >> 12).to(tl.float64) + 0.5) * 2.220446049250313e-16


@triton.jit
def _halvings(logits, columns, size, top, scale):
    """How many halvings each token is less likely than the likeliest; infinitely many beyond `size`, and for NaN."""
    x = tl.load(logits + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
    below = (top - x) * scale
    return tl.where(below >= 0, below, float("inf"))


@triton.jit
def _key(below):
    return below.to(tl.float32).to(tl.int32, bitcast=True)


@triton.jit
def _up_to(logits, size, top, scale, keys, BLOCK: tl.constexpr):
    """The number and the weight of the tokens up to each of the `keys` [K]."""
    counts = keys * 0
    weights = keys.to(tl.float64) * 0
    for first in range(0, size, BLOCK):
        below = _halvings(logits, first + tl.arange(0, BLOCK), size, top, scale)
        within = _key(below)[:, None] <= keys[None, :]
        counts += tl.sum(within.to(tl.int32), 0)
        weights += tl.sum(tl.where(within, tl.exp2(-below)[:, None], 0.0), 0).to(tl.float64)
    return counts, weights


@triton.jit
def _search(logits, size, top, scale, tokens, mass, high, count, weight, BLOCK: tl.constexpr):
    """Search the tokens up to the key `high`, `count` of them with `weight`, for the fewest, by key, that are `tokens`
    or weigh `mass`; all of them where they do not. Returns `low` and `high`, between which there is but the key of the
    last, the number and weight of the tokens, and which of its key the last is."""
    low = high * 0
    before = count * 0  # tokens below `low`, and their weight
    lighter = weight * 0
    meets = (count >= tokens) | (weight >= mass)
    while meets & (low < high) & (count - before > 1):
        step = (high - low) // _KEYS + 1
        numbers = tl.arange(0, _KEYS)
        keys = tl.minimum(low + numbers * step, high)
        counts, weights = _up_to(logits, size, top, scale, keys, BLOCK)
        short = (counts < tokens) & (weights < mass)
        passed = tl.sum(short.to(tl.int32), 0)  # in order of keys: first those that are too few
        last = numbers == passed - 1
        first = numbers == passed
        if passed > 0:
            before = tl.sum(tl.where(last, counts, 0), 0)
            lighter = tl.sum(tl.where(last, weights, 0.0), 0)
            low = tl.sum(tl.where(last, keys, 0), 0) + 1
        if passed < _KEYS:
            count = tl.sum(tl.where(first, counts, 0), 0)
            weight = tl.sum(tl.where(first, weights, 0.0), 0)
            high = tl.sum(tl.where(first, keys, 0), 0)
    equals = count - before
    share = (weight - lighter) / tl.maximum(equals, 1)
    wanted = tl.minimum(tokens - before, tl.ceil((mass - lighter) / tl.maximum(share, 1e-45)).to(tl.float32))
    nth = tl.where(meets, tl.minimum(tl.maximum(wanted.to(tl.int32), 1), equals), equals)
    return low, high, before + nth, lighter + nth * share, nth


@triton.jit
def _sample_kernel(logits, floats, integers, out, size, row_stride, BLOCK: tl.constexpr):
    """out[row] = a token for logits[row, :size]; `floats` and `integers` are rows of SAMPLING_DTYPE."""
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    floats += row * _ROW_WORDS
    integers += row * (_ROW_WORDS // 2)
    temperature = tl.load(floats + _TEMPERATURE)
    top_k = tl.load(integers + _TOP_K)

    top = tl.full((), float("-inf"), tl.float32)
    likeliest = tl.full((), 0, tl.int32)
    for first in range(0, size, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        x = tl.load(logits + columns, mask=columns < size, other=float("-inf")).to(tl.float32)
        most = tl.max(x, 0)
        if most > top:
            top = most
            likeliest = tl.min(tl.where(x == most, columns, size), 0)
    token = likeliest

    if (temperature >= _LEAST_GREEDY) & (top_k != 1):
        scale = _LOG2_E / temperature
        top_p = tl.load(floats + _TOP_P)
        min_p = tl.load(floats + _MIN_P)
        drawn = tl.load(integers + _SEED), tl.load(integers + _CHOICE), tl.load(integers + _POSITION)
        uniform = tl.sum(_uniform(drawn[0], drawn[1], drawn[2]), 0)
        farthest = tl.full((), _FARTHEST, tl.float32)
        limit = tl.minimum(farthest, tl.where(min_p > 0, -tl.log2(tl.maximum(min_p, 1e-38)), farthest))
        counts, weights = _up_to(logits, size, top, scale, tl.full((1,), _FARTHEST_KEY, tl.int32), BLOCK)
        count = tl.sum(counts, 0)
        mass = tl.sum(weights, 0)
        if (top_k > 0) | (top_p < 1) | (min_p > 0):
            token = _draw_likely(logits, size, top, scale, uniform, top_k, top_p, limit, count, mass, BLOCK)
        else:
            token = _draw_any(logits, size, top, scale, uniform * mass, likeliest, BLOCK)
    tl.store(out + row, token.to(tl.int64))


@triton.jit
def _draw_any(logits, size, top, scale, share, likeliest, BLOCK: tl.constexpr):
    """The token with which the mass, in the order of tokens, reaches `share`."""
    token = likeliest
    before = share * 0
    for first in range(0, size, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        below = _halvings(logits, columns, size, top, scale)
        weights = tl.where(below <= _FARTHEST, tl.exp2(-below), 0.0).to(tl.float64)
        after = before + tl.sum(weights, 0)
        if (before < share) & (after >= share):
            reached = (before + tl.cumsum(weights, 0) >= share) & (weights > 0)
            column = tl.min(tl.where(reached, columns, size), 0)
            token = tl.where(column < size, column, token)
        before = after
    return token


@triton.jit
def _draw_likely(logits, size, top, scale, uniform, top_k, top_p, limit, count, mass, BLOCK: tl.constexpr):
    """Draws after top-k, then top-p of the rest, then min-p, which ends at `limit` halvings: the token with which the
    mass reaches its share in the order of weights, equal ones in the order of tokens."""
    far = tl.full((), _FARTHEST_KEY, tl.int32)
    endless = mass + float("inf")
    tokens = tl.where(top_k > 0, tl.minimum(top_k, size), size).to(tl.int32)
    part = mass
    if (top_p < 1) & (tokens < size):
        _low, _high, _count, part, _nth = _search(logits, size, top, scale, tokens, endless, far, count, mass, BLOCK)
    most = tl.where(top_p < 1, top_p * part, endless)
    high = _key(limit)
    if high < far:
        counts, weights = _up_to(logits, size, top, scale, tl.arange(0, 1) + high, BLOCK)
        count = tl.sum(counts, 0)
        mass = tl.sum(weights, 0)
    _low, high, kept, part, _nth = _search(logits, size, top, scale, tokens, most, high, count, mass, BLOCK)
    counts, weights = _up_to(logits, size, top, scale, tl.arange(0, 1) + high, BLOCK)
    all_equals = tl.sum(counts, 0)
    low, high, _count, _mass, nth = _search(
        logits, size, top, scale, kept, uniform * part, high, all_equals, tl.sum(weights, 0), BLOCK
    )

    token = tl.full((), 0, tl.int32)
    seen = nth * 0
    for first in range(0, size, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        key = _key(_halvings(logits, columns, size, top, scale))
        equal = ((key >= low) & (key <= high)).to(tl.int32)
        here = tl.sum(equal, 0)
        if (seen < nth) & (seen + here >= nth):
            token = tl.min(tl.where((seen + tl.cumsum(equal, 0) == nth) & (equal > 0), columns, size), 0)
        seen += here
    return token


def sample_rows(logits: Tensor, sampling: SamplingArray) -> Tensor:
    """Token ids int64 [S] drawn from logits [S, vocabulary], each row by its element of `sampling`. A row of NaN gets
    some token of the vocabulary."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, size = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        packed = to_device(np.ascontiguousarray(sampling).view(np.int64).reshape(rows, -1), logits.device)
        numbers = packed.view(torch.float32), packed, out, size, logits.stride(0)
        _sample_kernel[(rows,)](logits, *numbers, BLOCK=_BLOCK, num_warps=_WARPS)
    return out


def specialisations() -> Iterator[Specialisation]:
    """Vocabularies of any size, in every dtype."""
    for kind in TRITON_TYPES.values():
        types = {"logits": f"*{kind}", "floats": "*fp32", "integers": "*i64", "out": "*i64", "size": "i32"}
        yield Specialisation(_sample_kernel, types | {"row_stride": "i32"}, {"BLOCK": _BLOCK}, {"num_warps": _WARPS})
