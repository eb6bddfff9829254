"""Attention over the paged cache of rows with few places: decoding, and drafts.

Query heads that share a key head, and all places of a row, form one tile. The parts of a context may be shared among
programs (arXiv 2311.01282), which keep a state for each part: how many parts a program takes, and whether a row is
shared out at all, changes no bit of its result.
"""

import triton
import triton.language as tl

from .attention_span import attend_span, empty_state, finish_state, first_state, merge_states
from .dependent_launch import begin_dependent

_ROWS = tl.constexpr(256)
"""Rows whose states are counted at a time."""


@triton.jit
def _first_part(start, WINDOW: tl.constexpr, PART: tl.constexpr):
    """The first part that a row from `start` on sees."""
    return tl.maximum(start - WINDOW + 1, 0) // PART if WINDOW else start * 0


@triton.jit
def _kept_states(start, count, run, WINDOW: tl.constexpr, PLACES: tl.constexpr, PART: tl.constexpr):
    """How many states of each head a row keeps: none, unless it decodes and has more parts than a program's `run`."""
    parts = tl.cdiv(start + count, PART) - _first_part(start, WINDOW, PART)
    return tl.where((count > 0) & (count <= PLACES) & (parts > run), parts * count, 0)


@triton.jit
def find_states(starts, counts, index, run, capacity, WINDOW: tl.constexpr, PLACES: tl.constexpr, PART: tl.constexpr):
    """Where the states of row `index` begin; -1 where it keeps none, since it has few parts, or there is no room in
    `capacity` states."""
    own = _kept_states(tl.load(starts + index), tl.load(counts + index), run, WINDOW, PLACES, PART)
    first = own * 0
    for at in range(0, index, _ROWS):
        other = at + tl.arange(0, _ROWS)
        start = tl.load(starts + other, mask=other < index, other=0)
        count = tl.load(counts + other, mask=other < index, other=0)
        first += tl.sum(_kept_states(start, count, run, WINDOW, PLACES, PART), 0)
    return tl.where((own > 0) & (first + own <= capacity), first, -1)


@triton.jit(do_not_specialize=["run", "capacity"])
def decode_kernel(
    q,
    keys,
    values,
    scales,
    sinks,
    out,
    mixes,
    sums,
    rows,
    starts,
    counts,
    first_places,
    block_ids,
    table_stride,
    q_stride,
    run,
    capacity,
    scale,
    softcap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_LINES: tl.constexpr,
    SCALE_LINES: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    PLACES: tl.constexpr,
    PART: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Program (row, key head and M queries, n) has places and query heads of that key head. Of a row with room for its
    states it takes `run` parts and keeps their states, in `mixes` [capacity, HEADS, HEAD_DIM] and `sums` [capacity,
    HEADS, 2]; of others the first program takes all parts, and merges them."""
    begin_dependent(DEPENDENT)
    index = tl.program_id(0)
    kv_head = tl.program_id(1) % KV_HEADS
    first_line = tl.program_id(1) // KV_HEADS * M
    count = tl.load(counts + index)
    group: tl.constexpr = HEADS // KV_HEADS
    if (first_line >= count * group) | (count > PLACES):
        return
    first = find_states(starts, counts, index, run, capacity, WINDOW, PLACES, PART)
    start = tl.load(starts + index)
    length = start + count
    low = _first_part(start, WINDOW, PART)
    shared = first >= 0
    nth = tl.program_id(2)
    if (nth > 0) & (first < 0):
        return
    begin = (low + nth * run) * PART
    end = tl.where(shared, tl.minimum(begin + run * PART, length), length)
    size = tl.where(shared, PART, length)
    line = first_line + tl.arange(0, M)
    place = line // group
    head = kv_head * group + line % group
    exists = place < count
    dim = tl.arange(0, DIMS)[None, :]
    inside = exists[:, None] & (dim < HEAD_DIM)
    token = tl.load(first_places + index).to(tl.int64) + place
    queries = tl.load(q + token[:, None] * q_stride + head[:, None] * HEAD_DIM + dim, mask=inside, other=0.0)
    blocks = block_ids + tl.load(rows + index).to(tl.int64) * table_stride
    for at in range(begin, end, size):
        states = first_state(sinks, head, SINKS, M, DIMS) + empty_state(M, DIMS)
        seen = at
        if WINDOW:
            seen = tl.maximum(at, start - WINDOW + 1)
        before, before_total, before_mix, maximum, total, mix = attend_span(
            states, queries, keys, values, scales, blocks, kv_head, seen, tl.minimum(at + size, end), start + place,
            start + place, scale, softcap, BLOCK_LINES, SCALE_LINES, HEAD_DIM, BLOCK_SIZE, LARGEST_CODE, WINDOW, CAPPED,
            True, PART, TILE, DIMS,
        )  # fmt: skip
        if shared:
            state = (first + (at // PART - low) * count + place).to(tl.int64) * HEADS + head
            tl.store(mixes + state[:, None] * HEAD_DIM + dim, mix, mask=inside)
            tl.store(sums + state * 2, maximum, mask=exists)
            tl.store(sums + state * 2 + 1, total, mask=exists)
        else:
            _, total, mix = merge_states(before, before_total, before_mix, maximum, total, mix)
            mixed = finish_state(total, mix, exists, LARGEST_CODE).to(out.dtype.element_ty)
            tl.store(out + (token * HEADS + head)[:, None] * HEAD_DIM + dim, mixed, mask=inside)


@triton.jit(do_not_specialize=["run", "capacity"])
def combine_kernel(
    mixes,
    sums,
    sinks,
    out,
    starts,
    counts,
    first_places,
    run,
    capacity,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    WINDOW: tl.constexpr,
    SINKS: tl.constexpr,
    PLACES: tl.constexpr,
    PART: tl.constexpr,
    DIMS: tl.constexpr,
    STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Program (row, head, place) merges the states that its query has, as `decode_kernel` does."""
    begin_dependent(DEPENDENT)
    index = tl.program_id(0)
    head = tl.program_id(1) + tl.arange(0, 1)
    place = tl.program_id(2)
    count = tl.load(counts + index)
    if place >= count:
        return
    first = find_states(starts, counts, index, run, capacity, WINDOW, PLACES, PART)
    if first < 0:
        return
    start = tl.load(starts + index)
    parts = tl.cdiv(start + count, PART) - _first_part(start, WINDOW, PART)
    dim = tl.arange(0, DIMS)[None, :]
    inside = dim < HEAD_DIM
    before, before_total, before_mix = first_state(sinks, head, SINKS, 1, DIMS)
    for part in tl.range(0, parts, num_stages=STAGES):
        state = (first + part * count + place).to(tl.int64) * HEADS + head
        maximum = tl.load(sums + state * 2)
        total = tl.load(sums + state * 2 + 1)
        mix = tl.load(mixes + state[:, None] * HEAD_DIM + dim, mask=inside, other=0.0)
        before, before_total, before_mix = merge_states(before, before_total, before_mix, maximum, total, mix)
    target = (tl.load(first_places + index).to(tl.int64) + place) * HEADS + head
    mixed = finish_state(before_total, before_mix, head >= 0, LARGEST_CODE).to(out.dtype.element_ty)
    tl.store(out + target[:, None] * HEAD_DIM + dim, mixed, mask=inside)
