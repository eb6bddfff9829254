"""Attention over latents (MLA, arXiv 2405.04434), one of which serves all query heads of a token: a key is a latent and
what is rotated behind it, a value the latent alone, so it is read once for both.

Places of a row and their heads stand one below the other, and some of these lines are a tile, be they of a decoding row
or of a prompt: one form of a kernel computes both. Parts of a context and their states are those of `attention_span`,
shared among programs as `decode_attention` does it; neither that nor what shares a step changes a bit of a result. The
reference is `attention.torch_attention.reference_attention`.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from ..step_batch import DeviceBatch, StepBatch
from .attention_plan import DECODE_PLACES, PART_TOKENS, PartsPlan, StepTiles, next_power_of_2
from .attention_span import empty_state, finish_state, merge_states, sum_weights, weigh_scores
from .decode_attention import combine_kernel, find_states
from .row_tiles import lay_recorded_tiles, lay_tiles
from .runtime import Specialisation

_LINES = 16
"""Lines of a tile: two states of twice as many spill, on every generation."""
_ENOUGH_PROGRAMS = 256
"""Programs that occupy a device, of which each takes much of a multiprocessor; to be measured."""
_LONG_RUN = 32
"""Parts that a program of many takes one after the other."""
_STATE_BYTES = 128 << 20
"""The most memory for states of parts, of one layer's attention."""
_LOG2E = tl.constexpr(math.log2(math.e))


class LatentAttentionSpec(NamedTuple):
    """The attention of one layer over a cache [blocks, block_size, latent + rotated], contiguous."""

    heads: int
    latent: int
    rotated: int
    block_size: int
    scale: float

    @property
    def key_size(self) -> int:
        return self.latent + self.rotated


@triton.jit
def _attend_latent_span(
    plain,
    turned,
    cache,
    blocks,
    begin,
    end,
    last,
    factor,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PART: tl.constexpr,
    TILE: tl.constexpr,
):
    """The states of the tokens from `begin`, a multiple of PART, to `end`, as `attention_span.attend_span` has them: of
    queries plain [M, DIMS] and turned [M, TURNED], which see tokens up to `last` [M]."""
    dim = tl.arange(0, plain.shape[1])[None, :]
    turned_dim = tl.arange(0, turned.shape[1])[None, :]
    before, before_total, before_mix = empty_state(plain.shape[0], plain.shape[1])
    maximum, total, mix = empty_state(plain.shape[0], plain.shape[1])
    for at in range(begin, end, TILE):
        if at % PART == 0:
            before, before_total, before_mix = merge_states(before, before_total, before_mix, maximum, total, mix)
            maximum, total, mix = empty_state(plain.shape[0], plain.shape[1])
        token = at + tl.arange(0, TILE)
        valid = token < end
        block = tl.load(blocks + token // BLOCK_SIZE, mask=valid, other=0)
        keys = cache + (block * BLOCK_SIZE + token % BLOCK_SIZE)[:, None] * (LATENT + ROTATED)
        latents = tl.load(keys + dim, mask=valid[:, None] & (dim < LATENT), other=0.0)
        is_turned = valid[:, None] & (turned_dim < ROTATED)
        turned_keys = tl.load(keys + LATENT + turned_dim, mask=is_turned, other=0.0)
        scores = tl.dot(turned, tl.trans(turned_keys), input_precision="ieee")
        scores = tl.dot(plain, tl.trans(latents), scores, input_precision="ieee")
        seen = valid[None, :] & (token[None, :] <= last[:, None])
        maximum, faded, weights = weigh_scores(scores, seen, maximum, factor, True)
        total = tl.fma(total, faded, sum_weights(weights))
        mix = tl.dot(weights.to(latents.dtype), latents, mix * faded[:, None], input_precision="ieee")
    return before, before_total, before_mix, maximum, total, mix


@triton.jit(do_not_specialize=["run", "capacity"])
def _latents_kernel(
    q,
    cache,
    out,
    mixes,
    sums,
    tiles,
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
    TILED: tl.constexpr,
    PLACES: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PART: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    DIMS: tl.constexpr,
    TURNED: tl.constexpr,
):
    """Program (row, n, m) has M lines, of which HEADS are a place, of a row with up to PLACES places: `run` parts, and
    keeps their states in `mixes` [capacity, HEADS, LATENT] and `sums` [capacity, HEADS, 2]; or, where there is no room
    for them, all. TILED: program n has those of a chunk that begin at the line in `tiles` [T, row and line]."""
    index = tl.program_id(0)
    first_line = tl.program_id(1) * M
    if TILED:
        first_line = tl.load(tiles + tl.program_id(0) * 2 + 1)
        index = tl.load(tiles + tl.program_id(0) * 2)
        if index < 0:
            return
    count = tl.load(counts + index)
    if first_line >= count * HEADS:
        return
    start = tl.load(starts + index)
    line = first_line + tl.arange(0, M)
    place = line // HEADS
    head = line % HEADS
    exists = place < count
    last = start + place
    begin = start * 0
    end = start + tl.minimum((first_line + M - 1) // HEADS + 1, count)
    first = begin - 1
    nth = tl.program_id(2)
    if not TILED:
        if count > PLACES:
            return
        first = find_states(starts, counts, index, run, capacity, 0, PLACES, PART)
        if (nth > 0) & (first < 0):
            return
    shared = first >= 0
    if shared:
        begin = nth * run * PART
        end = tl.minimum(begin + run * PART, start + count)
    size = tl.where(shared, PART, end)
    dim = tl.arange(0, DIMS)[None, :]
    turned_dim = tl.arange(0, TURNED)[None, :]
    inside = exists[:, None] & (dim < LATENT)
    token = tl.load(first_places + index).to(tl.int64) + place
    queries = q + token[:, None] * q_stride + head[:, None] * (LATENT + ROTATED)
    plain = tl.load(queries + dim, mask=inside, other=0.0)
    turned = tl.load(queries + LATENT + turned_dim, mask=exists[:, None] & (turned_dim < ROTATED), other=0.0)
    blocks = block_ids + tl.load(rows + index).to(tl.int64) * table_stride
    factor = scale * _LOG2E
    for part in range(begin, end, size):
        before, before_total, before_mix, maximum, total, mix = _attend_latent_span(
            plain, turned, cache, blocks, part, tl.minimum(part + size, end), last, factor,
            LATENT, ROTATED, BLOCK_SIZE, PART, TILE,
        )  # fmt: skip
        if shared:
            state = (first + part // PART * count + place).to(tl.int64) * HEADS + head
            tl.store(mixes + state[:, None] * LATENT + dim, mix, mask=inside)
            tl.store(sums + state * 2, maximum, mask=exists)
            tl.store(sums + state * 2 + 1, total, mask=exists)
        else:
            _, total, mix = merge_states(before, before_total, before_mix, maximum, total, mix)
            mixed = finish_state(total, mix, exists, 0).to(out.dtype.element_ty)
            tl.store(out + (token * HEADS + head)[:, None] * LATENT + dim, mixed, mask=inside)


@triton.jit
def _turn(at, cos, sin, place, valid, ROTATED: tl.constexpr, HALF: tl.constexpr, TURNS: tl.constexpr):
    """The halves of what stands at `at`, turned by the angles of a place if TURNS, and where they lie."""
    half: tl.constexpr = ROTATED // 2
    dim = tl.arange(0, HALF)[None, :]
    valid = valid & (dim < half)
    left = tl.load(at + dim, mask=valid, other=0.0)
    right = tl.load(at + half + dim, mask=valid, other=0.0)
    if TURNS:
        angle = place * ROTATED + dim
        by_cos = tl.load(cos + angle, mask=dim < half, other=0.0).to(tl.float32)
        by_sin = -tl.load(sin + angle, mask=dim < half, other=0.0).to(tl.float32)
        x, y = left.to(tl.float32), right.to(tl.float32)
        left = (x * by_cos - y * by_sin).to(left.dtype)
        right = (y * by_cos + x * by_sin).to(right.dtype)
    return left, right, dim, valid


@triton.jit
def _write_latents_kernel(
    q,
    key,
    cos,
    sin,
    cache,
    rows,
    starts,
    counts,
    first_places,
    owners,
    block_ids,
    table_stride,
    q_stride,
    key_stride,
    TURNS: tl.constexpr,
    HEADS: tl.constexpr,
    LATENT: tl.constexpr,
    ROTATED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    LINES: tl.constexpr,
    DIMS: tl.constexpr,
    HALF: tl.constexpr,
):
    """Program (place, 0) stores a place's key, turned if TURNS; program (place, n) turns LINES heads of its queries
    where they are. The first half of `sin` is negated."""
    place = tl.program_id(0).to(tl.int64)
    owner = tl.load(owners + place)
    offset = place - tl.load(first_places + owner)
    if offset >= tl.load(counts + owner):
        return  # a place that belongs to no row
    nth = tl.program_id(1)
    if nth == 0:
        position = tl.load(starts + owner) + offset
        row = tl.load(rows + owner).to(tl.int64)
        block = tl.load(block_ids + row * table_stride + position // BLOCK_SIZE)
        line = cache + (block * BLOCK_SIZE + position % BLOCK_SIZE) * (LATENT + ROTATED)
        own = key + place * key_stride
        dim = tl.arange(0, DIMS)
        tl.store(line + dim, tl.load(own + dim, mask=dim < LATENT, other=0.0), mask=dim < LATENT)
        here = tl.arange(0, 1)[:, None] == 0
        left, right, half_dim, valid = _turn(own + LATENT, cos, sin, place, here, ROTATED, HALF, TURNS)
        tl.store(line + LATENT + half_dim, left, mask=valid)
        tl.store(line + LATENT + ROTATED // 2 + half_dim, right, mask=valid)
    else:
        head = (nth - 1) * LINES + tl.arange(0, LINES)[:, None]
        at = q + place * q_stride + head * (LATENT + ROTATED) + LATENT
        lefts, rights, dims, all_valid = _turn(at, cos, sin, place, head < HEADS, ROTATED, HALF, TURNS)
        tl.debug_barrier()  # all have read what is written now
        tl.store(at + dims, lefts, mask=all_valid)
        tl.store(at + ROTATED // 2 + dims, rights, mask=all_valid)


def write_latents(
    spec: LatentAttentionSpec,
    cache: Tensor,
    batch: DeviceBatch,
    owners: Tensor,
    q: Tensor,
    key: Tensor,
    rotation: tuple[Tensor, Tensor] | None = None,
) -> None:
    """Store a step's keys [N, 1, key_size] in a layer's cache. `rotation`: cos and sin [N, 1, rotated] of
    `TorchAngles`, by which keys are rotated, and queries [N, heads, key_size] where they are. `owners`, int64 [N]: the
    row of each place."""
    if not batch.size:
        return
    cos, sin = (q, q) if rotation is None else rotation
    numbers = batch.rows, batch.starts, batch.counts, batch.first_places, owners, batch.block_ids
    strides = batch.block_ids.stride(0), q.stride(0), key.stride(0)
    plan = _write_plan(spec, rotation is not None)
    heads = 0 if rotation is None else triton.cdiv(spec.heads, plan["LINES"])
    _write_latents_kernel[batch.size, 1 + heads](q, key, cos, sin, cache, *numbers, *strides, **plan)


def plan_latent_tiles(spec: LatentAttentionSpec, batch: StepBatch) -> StepTiles:
    """The tiles of a step, from numbers that the host has."""
    counts = batch.counts
    few = counts[counts <= DECODE_PLACES[-1]]
    places = next(places for places in DECODE_PLACES if places >= few.max()) if few.any() else 0
    parts = -(-batch.longest // PART_TOKENS)
    if (there := batch.on_device).prompts:
        lines = torch.where(there.counts > places, there.counts * spec.heads, 0)
        most_rows = there.size // (places + 1)
        return StepTiles(places, parts, lay_recorded_tiles(lines, _LINES, there.size * spec.heads, most_rows))
    left = np.flatnonzero(counts > places)
    tiles = lay_tiles(left, counts[left] * spec.heads, _LINES, batch.token_ids.device) if len(left) else None
    return StepTiles(places, parts, tiles)


def plan_latent_parts(spec: LatentAttentionSpec, rows: int, tiles: StepTiles) -> PartsPlan:
    """As `plan_parts`."""
    programs = rows * triton.cdiv(tiles.places * spec.heads, _LINES)
    run = _LONG_RUN if programs >= _ENOUGH_PROGRAMS else 1
    if tiles.parts <= run:
        return PartsPlan(run, 1, 0)
    room = _STATE_BYTES // (4 * spec.heads * (spec.latent + 2))
    return PartsPlan(run, triton.cdiv(tiles.parts, run), min(rows * tiles.places * tiles.parts, room))


def attend_latents(spec: LatentAttentionSpec, cache: Tensor, batch: DeviceBatch, tiles: StepTiles, q: Tensor) -> Tensor:
    """Attention of the queries [N, heads, key_size], heads side by side, over a layer's cache, which has the step's
    keys already -> [N, heads * latent]."""
    rows = len(batch.counts)
    out = torch.empty(len(q), spec.heads * spec.latent, dtype=q.dtype, device=q.device)
    numbers = batch.rows, batch.starts, batch.counts, batch.first_places, batch.block_ids
    sizes = batch.block_ids.stride(0), q.stride(0)
    if tiles.places:
        shared = plan_latent_parts(spec, rows, tiles)
        mixes = torch.empty(shared.states * spec.heads * spec.latent, dtype=torch.float32, device=q.device)
        sums = torch.empty(shared.states * spec.heads * 2, dtype=torch.float32, device=q.device)
        limits = shared.run, shared.states
        tensors = q, cache, out, mixes, sums, batch.rows, *numbers
        grid = rows, triton.cdiv(tiles.places * spec.heads, _LINES), shared.programs
        _latents_kernel[grid](*tensors, *sizes, *limits, spec.scale, False, tiles.places, **_plan(spec))
        if shared.states:
            places = batch.starts, batch.counts, batch.first_places
            combine = combine_kernel[rows, spec.heads, tiles.places]
            combine(mixes, sums, sums, out, *places, *limits, **_combine_plan(spec, tiles.places))
    if tiles.chunks is not None:
        tensors = q, cache, out, out, out, tiles.chunks, *numbers
        _latents_kernel[len(tiles.chunks), 1, 1](*tensors, *sizes, 0, 0, spec.scale, True, 0, **_plan(spec))
    return out


def _sizes(spec: LatentAttentionSpec) -> dict[str, Any]:
    own = {"HEADS": spec.heads, "LATENT": spec.latent, "ROTATED": spec.rotated, "BLOCK_SIZE": spec.block_size}
    return own | {"DIMS": max(next_power_of_2(spec.latent), 16)}


def _plan(spec: LatentAttentionSpec) -> dict[str, Any]:
    """By the shape alone, whatever a row has: so prompts and drafts have the bits of single tokens."""
    tile = {"PART": PART_TOKENS, "M": _LINES, "TILE": 32}
    turned = {"TURNED": max(next_power_of_2(spec.rotated), 16)}
    return _sizes(spec) | tile | turned | {"num_warps": 8, "num_stages": 2}


def _combine_plan(spec: LatentAttentionSpec, places: int) -> dict[str, Any]:
    """As that of `attention_plan.combine_plan`."""
    sizes = _sizes(spec)
    own = {"HEADS": spec.heads, "HEAD_DIM": spec.latent, "LARGEST_CODE": 0.0, "WINDOW": 0, "SINKS": False}
    cut = {"PLACES": places, "PART": PART_TOKENS, "DIMS": sizes["DIMS"], "STAGES": 4}
    return own | cut | {"num_warps": max(sizes["DIMS"] // 256, 1)}


def _write_plan(spec: LatentAttentionSpec, turns: bool) -> dict[str, Any]:
    """A tile of heads, with four warps."""
    lines = min(next_power_of_2(spec.heads), 16)
    tile = {"TURNS": turns, "LINES": lines, "HALF": next_power_of_2(spec.rotated // 2)}
    return _sizes(spec) | tile | {"num_warps": 4}


SHAPES = (
    LatentAttentionSpec(128, 512, 64, 16, 0.1),  # DeepSeek V3, R1
    LatentAttentionSpec(64, 512, 64, 16, 0.1),  # Kimi-K2
    LatentAttentionSpec(20, 512, 64, 16, 0.1),  # GLM-4.7-Flash
    LatentAttentionSpec(16, 512, 64, 16, 0.1),  # DeepSeek V2 Lite; V3 on eight ranks
)
"""Shapes of published models, for proofs."""


def specialisations() -> Iterator[Specialisation]:
    for spec in SHAPES:
        for kind in ("bf16", "fp16"):
            data = dict.fromkeys(("q", "key", "cos", "sin", "cache", "out"), f"*{kind}")
            data |= dict.fromkeys(("mixes", "sums", "sinks"), "*fp32") | {"block_ids": "*i64", "owners": "*i64"}
            data |= dict.fromkeys(("tiles", "rows", "starts", "counts", "first_places"), "*i32")
            data |= dict.fromkeys(("table_stride", "q_stride", "key_stride", "run", "capacity"), "i32")
            data |= {"scale": "fp32"}
            for tiled in (False, True):
                plan = _plan(spec) | {"TILED": tiled, "PLACES": 0 if tiled else 1}
                yield Specialisation.of_plan(_latents_kernel, data, plan, ("mma",))
            yield Specialisation.of_plan(combine_kernel, data, _combine_plan(spec, 1))
            for turns in (False, True):
                yield Specialisation.of_plan(_write_latents_kernel, data, _write_plan(spec, turns))
