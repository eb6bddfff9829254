"""Attention of chunks of prompts over the paged cache: tiles of queries, tokens one below the other, each token's query
heads of one key head side by side."""

import triton
import triton.language as tl

from .attention_span import attend_span, empty_state, finish_state, first_state, merge_states


@triton.jit
def chunk_kernel(
    q,
    keys,
    values,
    scales,
    sinks,
    out,
    tiles,
    ends,
    rows,
    starts,
    counts,
    first_places,
    block_ids,
    table_stride,
    q_stride,
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
    SPANS: tl.constexpr,
    PART: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Program (tile, key head) has M // group tokens of one chunk, from the offset in `tiles` [T, row and offset] on,
    and all query heads of that key head; row -1 is nobody's. Keys that all of them see are not masked."""
    index = tl.load(tiles + tl.program_id(0) * 2)
    if index < 0:
        return
    offset = tl.load(tiles + tl.program_id(0) * 2 + 1)
    kv_head = tl.program_id(1)
    start = tl.load(starts + index)
    count = tl.load(counts + index)
    group: tl.constexpr = HEADS // KV_HEADS
    line = tl.arange(0, M)
    place = offset + line // group
    head = kv_head * group + line % group
    exists = (line < M // group * group) & (place < count)
    dim = tl.arange(0, DIMS)[None, :]
    inside = exists[:, None] & (dim < HEAD_DIM)
    token = tl.load(first_places + index).to(tl.int64) + place
    queries = tl.load(q + token[:, None] * q_stride + head[:, None] * HEAD_DIM + dim, mask=inside, other=0.0)
    states = first_state(sinks, head, SINKS, M, DIMS) + empty_state(M, DIMS)
    blocks = block_ids + tl.load(rows + index).to(tl.int64) * table_stride
    end = start + tl.minimum(offset + M // group, count)
    last = start + place
    least = start + offset + 1
    if SPANS:
        last = tl.load(ends + token, mask=exists, other=0) - 1
        end = tl.max(last, 0) + 1
        least = tl.min(tl.where(exists, last, end), 0) + 1
    begin = 0
    if WINDOW:
        begin = tl.maximum(start + offset - WINDOW + 1, 0)
    else:
        begin = least // TILE * TILE
        states = attend_span(
            states, queries, keys, values, scales, blocks, kv_head, 0, begin, start + place, last, scale, softcap,
            BLOCK_LINES, SCALE_LINES, HEAD_DIM, BLOCK_SIZE, LARGEST_CODE, WINDOW, CAPPED, False, PART, TILE, DIMS,
        )  # fmt: skip
    states = attend_span(
        states, queries, keys, values, scales, blocks, kv_head, begin, end, start + place, last, scale, softcap,
        BLOCK_LINES, SCALE_LINES, HEAD_DIM, BLOCK_SIZE, LARGEST_CODE, WINDOW, CAPPED, True, PART, TILE, DIMS,
    )  # fmt: skip
    _, total, mix = merge_states(states[0], states[1], states[2], states[3], states[4], states[5])
    mixed = finish_state(total, mix, exists, LARGEST_CODE).to(out.dtype.element_ty)
    tl.store(out + (token * HEADS + head)[:, None] * HEAD_DIM + dim, mixed, mask=inside)
