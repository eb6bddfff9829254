"""Attention over the paged cache: of rows with few places (decoding, drafts), and of chunks of prompts.

Query heads that share a key head, and all places of a decoding row, form one tile. Scores stay in registers
(FlashAttention, arXiv 2205.14135). A decoding row's context is cut into parts (arXiv 2311.01282), as many as its own
length says, so its result depends on no other row. Sinks: arXiv 2508.10925. The reference is
`attention.torch_attention.reference_attention`.

Codes of eight bits are exact in the queries' dtype: a key's scale multiplies scores, a value's scale weights, and
LARGEST_CODE divides the whole mix.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_choice import FP8_CAPABILITY
from ..step_batch import DeviceBatch
from .attention_plan import (
    CODED_SHAPES,
    DECODE_PLACES,
    SHAPES,
    AttentionSpec,
    LayerCache,
    StepTiles,
    chunk_plan,
    combine_plan,
    decode_plan,
)
from .runtime import CODE_TYPES, Specialisation, capability

_LOG2E = tl.constexpr(math.log2(math.e))


@triton.jit
def _attend_span(
    state,
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
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """The `state` (maximum [M], sum [M], mix [M, DIMS]) of queries q [M, DIMS] at `position` [M] after the tokens from
    `begin` to `end`, too. `blocks` is the row's line of the block table. MASKED: a query sees tokens up to `last` [M],
    and not all."""
    maximum, total, mix = state
    dim = tl.arange(0, DIMS)[None, :]
    for at in range(begin, end, TILE):
        token = at + tl.arange(0, TILE)
        valid = token < end
        block = tl.load(blocks + token // BLOCK_SIZE, mask=valid, other=0)
        line = (block * KV_HEADS + kv_head) * BLOCK_SIZE + token % BLOCK_SIZE
        inside = valid[:, None] & (dim < HEAD_DIM)
        key = tl.load(keys + line[:, None] * HEAD_DIM + dim, mask=inside, other=0.0).to(q.dtype)
        scores = tl.dot(q, tl.trans(key), input_precision="ieee")
        if LARGEST_CODE > 0:
            key_scale = tl.load(scales + 2 * line, mask=valid, other=0.0) * (scale / LARGEST_CODE)
            scores = scores * key_scale[None, :]
        else:
            scores = scores * scale
        if CAPPED:
            scores = softcap * (2 * tl.sigmoid(2 * scores / softcap) - 1)
        scores = scores * _LOG2E
        if MASKED:
            seen = valid[None, :] & (token[None, :] <= last[:, None])
            if WINDOW:
                seen = seen & (token[None, :] > position[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(maximum, tl.max(scores, 1))
        base = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(scores - base[:, None])
        faded = tl.exp2(maximum - base)
        value = tl.load(values + line[:, None] * HEAD_DIM + dim, mask=inside, other=0.0).to(q.dtype)
        total = total * faded + tl.sum(weights, 1)
        if LARGEST_CODE > 0:
            weights = weights * tl.load(scales + 2 * line + 1, mask=valid, other=0.0)[None, :]
        mix = mix * faded[:, None] + tl.dot(weights.to(q.dtype), value, input_precision="ieee")
        maximum = highest
    return maximum, total, mix


@triton.jit
def _first_state(sinks, head, first, SINKS: tl.constexpr, M: tl.constexpr, DIMS: tl.constexpr):
    """The state before any token; where `first` is true, the sinks of heads [M] count as a token with value 0."""
    maximum = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * _LOG2E
        maximum = tl.where(first, sink, maximum)
        total = tl.where(first, 1.0, total)
    return maximum, total, tl.zeros([M, DIMS], tl.float32)


@triton.jit
def _parts(start, count, WINDOW: tl.constexpr, TILE: tl.constexpr, LEAST: tl.constexpr, MOST: tl.constexpr):
    """The first token that a row sees, and the tokens of each of its parts."""
    low = 0
    if WINDOW:
        low = tl.maximum(start - WINDOW + 1, 0) // TILE * TILE
    tokens = start + count - low
    parts = tl.minimum(tl.cdiv(tokens, LEAST), MOST)
    return low, tl.cdiv(tl.cdiv(tokens, parts), TILE) * TILE


@triton.jit
def _decode_kernel(
    q,
    keys,
    values,
    scales,
    sinks,
    out,
    mixes,
    sums,
    first_states,
    rows,
    starts,
    counts,
    first_places,
    block_ids,
    table_stride,
    q_stride,
    parts,
    scale,
    softcap,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    PLACES: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Program (row, key head, part) has all places and query heads of that key head, and one part of the context. Rows
    of several parts keep their states in `mixes` [decoding places, HEADS, parts, HEAD_DIM] and `sums` [.., 2], from
    `first_states` on."""
    index = tl.program_id(0)
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    count = tl.load(counts + index)
    if (count == 0) | (count > PLACES):
        return
    start = tl.load(starts + index)
    low, size = _parts(start, count, WINDOW, TILE, LEAST, MOST)
    length = start + count
    begin = low + part * size
    if begin >= length:
        return
    group: tl.constexpr = HEADS // KV_HEADS
    line = tl.arange(0, M)
    place = line // group
    head = kv_head * group + line % group
    exists = place < count
    dim = tl.arange(0, DIMS)[None, :]
    inside = exists[:, None] & (dim < HEAD_DIM)
    token = tl.load(first_places + index).to(tl.int64) + place
    queries = tl.load(q + token[:, None] * q_stride + head[:, None] * HEAD_DIM + dim, mask=inside, other=0.0)
    state = _first_state(sinks, head, part == 0, SINKS, M, DIMS)
    blocks = block_ids + tl.load(rows + index).to(tl.int64) * table_stride
    maximum, total, mix = _attend_span(
        state, queries, keys, values, scales, blocks, kv_head, begin, tl.minimum(begin + size, length), start + place,
        start + place, scale, softcap, KV_HEADS, HEAD_DIM, BLOCK_SIZE, LARGEST_CODE, WINDOW, CAPPED, True, TILE, DIMS,
    )  # fmt: skip
    if LARGEST_CODE > 0:
        mix = mix / LARGEST_CODE
    at = token * HEADS + head
    if low + size >= length:
        mixed = mix / tl.where(exists, total, 1.0)[:, None]
        tl.store(out + at[:, None] * HEAD_DIM + dim, mixed.to(out.dtype.element_ty), mask=inside)
    else:
        state_place = tl.load(first_states + index).to(tl.int64) + place
        at = (state_place * HEADS + head) * parts + part
        tl.store(mixes + at[:, None] * HEAD_DIM + dim, mix, mask=inside)
        tl.store(sums + at * 2, maximum, mask=exists)
        tl.store(sums + at * 2 + 1, total, mask=exists)


@triton.jit
def _combine_kernel(
    mixes,
    sums,
    out,
    first_states,
    starts,
    counts,
    first_places,
    parts,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    PLACES: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Program (row, head, place) adds the parts of one query."""
    index = tl.program_id(0)
    place = tl.program_id(2)
    count = tl.load(counts + index)
    if (place >= count) | (count > PLACES):
        return
    start = tl.load(starts + index)
    low, size = _parts(start, count, WINDOW, TILE, LEAST, MOST)
    used = tl.cdiv(start + count - low, size)
    if used == 1:
        return
    at = (tl.load(first_states + index).to(tl.int64) + place) * HEADS + tl.program_id(1)
    part = tl.arange(0, MOST)
    dim = tl.arange(0, DIMS)
    valid = part < used
    maximum = tl.load(sums + (at * parts + part) * 2, mask=valid, other=float("-inf"))
    total = tl.load(sums + (at * parts + part) * 2 + 1, mask=valid, other=0.0)
    weight = tl.exp2(maximum - tl.max(maximum, 0))
    inside = valid[:, None] & (dim < HEAD_DIM)[None, :]
    mix = tl.load(mixes + (at * parts + part)[:, None] * HEAD_DIM + dim[None, :], mask=inside, other=0.0)
    whole = tl.sum(mix * weight[:, None], 0) / tl.sum(total * weight, 0)
    target = (tl.load(first_places + index).to(tl.int64) + place) * HEADS + tl.program_id(1)
    tl.store(out + target * HEAD_DIM + dim, whole.to(out.dtype.element_ty), mask=dim < HEAD_DIM)


@triton.jit
def _chunk_kernel(
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
    LARGEST_CODE: tl.constexpr,
    WINDOW: tl.constexpr,
    CAPPED: tl.constexpr,
    SINKS: tl.constexpr,
    SPANS: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
):
    """Program (tile, key head) has M // group tokens of one chunk, from the offset in `tiles` [T, row and offset] on,
    and all query heads of that key head. Keys that all of them see are not masked."""
    index = tl.load(tiles + tl.program_id(0) * 2)
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
    state = _first_state(sinks, head, True, SINKS, M, DIMS)
    blocks = block_ids + tl.load(rows + index).to(tl.int64) * table_stride
    end = start + tl.minimum(offset + M // group, count)
    last = start + place
    if SPANS:
        last = tl.load(ends + token, mask=exists, other=0) - 1
        end = tl.maximum(end, tl.max(last, 0) + 1)
    begin = 0
    if WINDOW:
        begin = tl.maximum(start + offset - WINDOW + 1, 0) // TILE * TILE
    else:
        begin = (start + offset + 1) // TILE * TILE
        state = _attend_span(
            state, queries, keys, values, scales, blocks, kv_head, 0, begin, start + place, last, scale, softcap,
            KV_HEADS, HEAD_DIM, BLOCK_SIZE, LARGEST_CODE, WINDOW, CAPPED, False, TILE, DIMS,
        )  # fmt: skip
    _, total, mix = _attend_span(
        state, queries, keys, values, scales, blocks, kv_head, begin, end, start + place, last, scale, softcap,
        KV_HEADS, HEAD_DIM, BLOCK_SIZE, LARGEST_CODE, WINDOW, CAPPED, True, TILE, DIMS,
    )  # fmt: skip
    if LARGEST_CODE > 0:
        mix = mix / LARGEST_CODE
    mixed = (mix / tl.where(exists, total, 1.0)[:, None]).to(out.dtype.element_ty)
    tl.store(out + (token * HEADS + head)[:, None] * HEAD_DIM + dim, mixed, mask=inside)


def attend(
    spec: AttentionSpec,
    cache: LayerCache,
    batch: DeviceBatch,
    tiles: StepTiles,
    q: Tensor,
    sinks: Tensor | None,
) -> Tensor:
    """Attention of the queries [N, heads, head_dim], heads side by side, over a layer's cache, which has the step's
    keys and values already -> [N, heads * head_dim]. `sinks`: float32 [heads]."""
    shape = spec.shape
    rows = len(batch.counts)
    out = torch.empty(len(q), shape.heads * shape.head_dim, dtype=q.dtype, device=q.device)
    numbers = batch.rows, batch.starts, batch.counts, batch.first_places, batch.block_ids
    inputs = q, *cache.pointers, q if sinks is None else sinks, out
    sizes = batch.block_ids.stride(0), q.stride(0)
    if tiles.places:
        parts = tiles.parts
        first_states = batch.first_places if tiles.first_states is None else tiles.first_states
        states = tiles.decoded * shape.heads * parts if parts > 1 else 0
        mixes = torch.empty(states * shape.head_dim, dtype=torch.float32, device=q.device)
        sums = torch.empty(states * 2, dtype=torch.float32, device=q.device)
        plan = decode_plan(spec, tiles.places, sinks is not None)
        decode = _decode_kernel[rows, shape.kv_heads, parts]
        decode(*inputs, mixes, sums, first_states, *numbers, *sizes, parts, spec.scale, spec.softcap, **plan)
        if parts > 1:
            places = batch.starts, batch.counts, batch.first_places
            combine = _combine_kernel[rows, shape.heads, tiles.places]
            combine(mixes, sums, out, first_states, *places, parts, **combine_plan(spec, tiles.places))
    if tiles.chunks is not None:
        ends = batch.ends if spec.both_ways else None
        plan = chunk_plan(spec, capability(q.device), sinks is not None, ends is not None)
        chunk = _chunk_kernel[len(tiles.chunks), shape.kv_heads]
        seen = tiles.chunks if ends is None else ends
        chunk(*inputs, tiles.chunks, seen, *numbers, *sizes, spec.scale, spec.softcap, **plan)
    return out


def specialisations() -> Iterator[Specialisation]:
    """The shapes of published models, with and without codes, windows, caps and sinks."""
    specs = [AttentionSpec(shape, shape.head_dim**-0.5) for shape in (*SHAPES, *CODED_SHAPES)]
    specs += [AttentionSpec(SHAPES[0], 0.1, window=4096), AttentionSpec(SHAPES[3], 0.1, window=4096, softcap=50.0)]
    for spec in specs:
        for kind in ("bf16", "fp16"):
            yield from _forms(spec, kind, sinks=spec.shape[:4] == SHAPES[-1][:4])


def _forms(spec: AttentionSpec, kind: str, sinks: bool) -> Iterator[Specialisation]:
    most = spec.most_decoded
    for places in (places for places in DECODE_PLACES if places <= most):
        yield _form(_decode_kernel, spec, kind, decode_plan(spec, places, sinks), ("mma",))
    yield _form(_combine_kernel, spec, kind, combine_plan(spec, 1), ())
    for least, most in ((80, 89), (90, 100)):
        form = _form(_chunk_kernel, spec, kind, chunk_plan(spec, least, sinks), ("mma",))
        yield form._replace(least=max(least, form.least), most=most)


def _form(kernel: Any, spec: AttentionSpec, kind: str, plan: dict[str, Any], wanted: tuple[str, ...]) -> Specialisation:
    codes = spec.shape.codes
    fp32 = {"mixes", "sums", "sinks", "scales"}
    int32 = {"rows", "starts", "counts", "first_places", "first_states", "tiles", "ends"}
    types = {}
    for name in kernel.arg_names:
        if name in ("keys", "values"):
            types[name] = f"*{kind if codes is None else CODE_TYPES[codes]}"
        elif name in ("q", "out"):
            types[name] = f"*{kind}"
        elif name in fp32 or name in int32 or name == "block_ids":
            types[name] = "*fp32" if name in fp32 else "*i32" if name in int32 else "*i64"
        elif name in ("scale", "softcap"):
            types[name] = "fp32"
        elif name in ("table_stride", "q_stride", "parts"):
            types[name] = "i32"
    options: dict[str, int] = {name: plan[name] for name in ("num_warps", "num_stages") if name in plan}
    constants = {name: value for name, value in plan.items() if name not in options}
    least = FP8_CAPABILITY if codes == torch.float8_e4m3fn else 80
    return Specialisation(kernel, types, constants, options, wanted, least)
