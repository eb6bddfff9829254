"""Attention of some queries to some tokens of the paged cache, and the order in which its sums are taken.

Scores stay in registers (FlashAttention, arXiv 2205.14135). A context is cut into parts of PART_TOKENS tokens from
position 0 on; a part has a state of its own, and states are merged from left to right. Whoever computes a query, with
whichever others and in however many programs, takes the same sums in the same order: what is fully masked changes no
bit of a state, and what is rounded together is written as `fma`, lest the compiler decide it.

Codes of eight bits are exact in the queries' dtype: a key's scale multiplies scores, a value's scale weights, and
LARGEST_CODE divides the whole mix. Sinks: arXiv 2508.10925.
"""

import math

import triton
import triton.language as tl

_LOG2E = tl.constexpr(math.log2(math.e))
_UNIT = tl.constexpr(2.0**-23)
_ONE = tl.constexpr(0x3F800000)
"""The bits of 1.0: a number between 0 and 1 that is added to it gives these and its units."""


@triton.jit
def sum_weights(weights):
    """The sum of each line of `weights` [M, TILE], from 0 to 1: by integers, so in any order."""
    units = (weights + 1.0).to(tl.int32, bitcast=True) - _ONE
    return tl.sum(units, 1).to(tl.float32) * _UNIT


@triton.jit
def weigh_scores(scores, seen, maximum, factor, MASKED: tl.constexpr):
    """The maximum [M] with scores [M, TILE] times `factor`, by what earlier weights fade, and the weights of the
    scores; where they are MASKED, of those that are seen."""
    most = tl.where(seen, scores, float("-inf")) if MASKED else scores
    highest = tl.maximum(maximum, tl.max(most, 1) * factor)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    below = tl.fma(scores, factor + tl.zeros_like(scores), -base[:, None])
    if MASKED:
        below = tl.where(seen, below, float("-inf"))
    weights = tl.exp2(below)
    return highest, tl.exp2(maximum - base), weights


@triton.jit
def merge_states(maximum, total, mix, next_maximum, next_total, next_mix):
    """The state of the tokens of two states, the left ones first: maximum [M], sum [M], mix [M, DIMS]."""
    highest = tl.maximum(maximum, next_maximum)
    base = tl.where(highest == float("-inf"), 0.0, highest)
    faded = tl.exp2(maximum - base)
    weight = tl.exp2(next_maximum - base)
    total = tl.fma(total, faded, next_total * weight)
    return highest, total, tl.fma(mix, faded[:, None], next_mix * weight[:, None])


@triton.jit
def empty_state(M: tl.constexpr, DIMS: tl.constexpr):
    return tl.full([M], float("-inf"), tl.float32), tl.zeros([M], tl.float32), tl.zeros([M, DIMS], tl.float32)


@triton.jit
def first_state(sinks, head, SINKS: tl.constexpr, M: tl.constexpr, DIMS: tl.constexpr):
    """The state before any token: the sinks of heads [M] count as a token with value 0."""
    maximum, total, mix = empty_state(M, DIMS)
    if SINKS:
        maximum = tl.load(sinks + head).to(tl.float32) * _LOG2E
        total += 1.0
    return maximum, total, mix


@triton.jit
def finish_state(total, mix, exists, LARGEST_CODE: tl.constexpr):
    """What queries [M] that exist get of a whole context."""
    if LARGEST_CODE > 0:
        mix = mix / LARGEST_CODE
    return mix / tl.where(exists, total, 1.0)[:, None]


@triton.jit
def _load(pointers, mask, MASKED: tl.constexpr):
    """The numbers at the pointers; where they are MASKED, 0 beyond the mask."""
    return tl.load(pointers, mask=mask, other=0.0) if MASKED else tl.load(pointers)


@triton.jit
def attend_span(
    states,
    q,
    keys,
    values,
    scales,
    blocks,
    kv_head,
    begin,
    end,
    position,
    last,
    scale,
    softcap,
    BLOCK_LINES: tl.constexpr,
    SCALE_LINES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """`states` after the tokens from `begin` to `end`, too: the state of the parts that are over, and of the one that
    is not, of queries q [M, DIMS] at `position` [M]. `blocks`: the row's line of the block table. MASKED: a query sees
    tokens up to `last` [M], and not all; others see all, and `end` is a multiple of TILE. So is `begin` without WINDOW;
    what lies before a window may be another sequence's, and is not read."""
    before, before_total, before_mix, maximum, total, mix = states
    dim = tl.arange(0, DIMS)[None, :]
    if LARGEST_CODE > 0:
        scale = scale / LARGEST_CODE
    # Scores times `factor` are halvings.
    factor = (2 * softcap if CAPPED else scale) * _LOG2E
    for at in range(begin // TILE * TILE if WINDOW else begin, end, TILE):
        if at % PART == 0:
            before, before_total, before_mix = merge_states(before, before_total, before_mix, maximum, total, mix)
            maximum, total, mix = empty_state(mix.shape[0], DIMS)
        token = at + tl.arange(0, TILE)
        valid = (token < end) if MASKED else (token >= 0)
        if WINDOW:
            valid = valid & (token >= begin)
        if BLOCK_SIZE % TILE == 0:
            block = tl.load(blocks + at // BLOCK_SIZE)
        elif MASKED:
            block = tl.load(blocks + token // BLOCK_SIZE, mask=valid, other=0)
        else:
            block = tl.load(blocks + token // BLOCK_SIZE)
        line = block * BLOCK_LINES + kv_head * BLOCK_SIZE + token % BLOCK_SIZE
        scale_line = block * SCALE_LINES + kv_head * BLOCK_SIZE + token % BLOCK_SIZE
        inside = valid[:, None] & (dim < HEAD_DIM)
        padded: tl.constexpr = MASKED or DIMS != HEAD_DIM
        key = _load(keys + line[:, None] * HEAD_DIM + dim, inside, padded).to(q.dtype)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee")
        if LARGEST_CODE > 0:
            scores = scores * _load(scales + 2 * scale_line, valid, MASKED)[None, :]
        if CAPPED:
            scores = tl.sigmoid(scores * (2 * scale / softcap)) - 0.5
        seen = valid[None, :]
        if MASKED:
            seen = seen & (token[None, :] <= last[:, None])
            if WINDOW:
                seen = seen & (token[None, :] > position[:, None] - WINDOW)
        maximum, faded, weights = weigh_scores(scores, seen, maximum, factor, MASKED)
        value = _load(values + line[:, None] * HEAD_DIM + dim, inside, padded).to(q.dtype)
        total = tl.fma(total, faded, sum_weights(weights))
        if LARGEST_CODE > 0:
            weights = weights * _load(scales + 2 * scale_line + 1, valid, MASKED)[None, :]
        mix = tl.dot(weights.to(q.dtype), value, mix * faded[:, None], input_precision="ieee")
    return before, before_total, before_mix, maximum, total, mix
