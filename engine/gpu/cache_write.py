"""Norms of heads, rotation (arXiv 2104.09864) and the paged cache's write, in one pass over a layer's queries, keys and
values.

Keys and values go where the block table says, as they are or as codes of eight bits with a scale for each line. The
references are `layers.norm.TorchNorm`, `layers.rotary.TorchAngles` and a plain copy.
"""

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_choice import FP8_CAPABILITY
from ..step_batch import DeviceBatch
from .attention_plan import CODED_SHAPES, SHAPES, CacheShape, LayerCache, next_power_of_2
from .codes import to_codes
from .dependent_launch import begin_dependent
from .norm import TritonNorm
from .runtime import CODE_TYPES, Specialisation, dependent_launch


@triton.jit
def _write_kernel(
    q,
    k,
    v,
    rotated,
    cos,
    sin,
    weights,
    keys,
    values,
    scales,
    rows,
    starts,
    counts,
    first_places,
    owners,
    block_ids,
    table_stride,
    q_stride,
    k_stride,
    v_stride,
    eps,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORMED: tl.constexpr,
    FIRST_KIND: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_LINES: tl.constexpr,
    SCALE_LINES: tl.constexpr,
    LARGEST_CODE: tl.constexpr,
    LINES: tl.constexpr,
    DIMS: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Program (place, kind, n) moves LINES heads of one token: keys, values or queries. ROTARY_DIM 0: nothing is
    rotated, and no program is for queries; FIRST_KIND 2: all are. The first NORMED of queries', keys' and values' heads
    are normalised before, times a line of `weights` each."""
    begin_dependent(DEPENDENT)
    place = tl.program_id(0).to(tl.int64)
    kind = FIRST_KIND + tl.program_id(1)
    owner = tl.load(owners + place)
    offset = place - tl.load(first_places + owner)
    if offset >= tl.load(counts + owner):
        return  # a place that belongs to no row
    head = tl.program_id(2) * LINES + tl.arange(0, LINES)[:, None]
    dim = tl.arange(0, DIMS)[None, :]
    position = tl.load(starts + owner) + offset
    row = tl.load(rows + owner).to(tl.int64)
    block = tl.load(block_ids + row * table_stride + position // BLOCK_SIZE)
    inside = head * BLOCK_SIZE + position % BLOCK_SIZE
    line = block * BLOCK_LINES + inside
    line_scales = scales + 2 * (block * SCALE_LINES + inside)
    valid = (head < KV_HEADS) & (dim < HEAD_DIM)
    scale = weights + head * HEAD_DIM
    if kind == 1:
        value = tl.load(v + place * v_stride + head * HEAD_DIM + dim, mask=valid, other=0.0)
        if NORMED > HEADS + KV_HEADS:
            of_values = scale + (HEADS + KV_HEADS) * HEAD_DIM + dim
            value = _times(value, _inverse_rms(value, HEAD_DIM, eps), of_values, valid)
        _store(values, line_scales + 1, line, dim, value, valid, head < KV_HEADS, HEAD_DIM, LARGEST_CODE)
    elif kind == 0:
        heads = k + place * k_stride + head * HEAD_DIM
        of_keys = scale + HEADS * HEAD_DIM
        turned = _rotate(heads, cos, sin, of_keys, eps, place, dim, valid, HEAD_DIM, ROTARY_DIM, NORMED > 0)
        _store(keys, line_scales, line, dim, turned, valid, head < KV_HEADS, HEAD_DIM, LARGEST_CODE)
    else:
        valid = (head < HEADS) & (dim < HEAD_DIM)
        heads = q + place * q_stride + head * HEAD_DIM
        turned = _rotate(heads, cos, sin, scale, eps, place, dim, valid, HEAD_DIM, ROTARY_DIM, NORMED > 0)
        tl.store(rotated + (place * HEADS + head) * HEAD_DIM + dim, turned, mask=valid)


@triton.jit
def _store(cache, scales, line, dim, x, valid, head_valid, HEAD_DIM: tl.constexpr, LARGEST_CODE: tl.constexpr):
    """Stores lines x, as they are or as codes whose largest stands for the line's largest number, which goes to
    `scales`."""
    if LARGEST_CODE > 0:
        wide = x.to(tl.float32)
        largest = tl.max(tl.abs(wide), 1, keep_dims=True)
        tl.store(scales, largest, mask=head_valid)
        x = to_codes(wide, largest, cache.dtype.element_ty, LARGEST_CODE)
    tl.store(cache + line * HEAD_DIM + dim, x, mask=valid)


@triton.jit
def _inverse_rms(x, HEAD_DIM: tl.constexpr, eps):
    """What normalises each line of x."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1, keep_dims=True) / HEAD_DIM + eps)


@triton.jit
def _times(x, inverse_rms, weights, valid):
    """Lines, normalised, times the weights that lie at `weights`, rounded as `norm` does."""
    weight = tl.load(weights, mask=valid, other=0.0)
    return ((x.to(tl.float32) * inverse_rms).to(weight.dtype) * weight).to(x.dtype)


@triton.jit
def _rotate(
    heads,
    cos,
    sin,
    weights,
    eps,
    place,
    dim,
    valid,
    HEAD_DIM: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    NORMS: tl.constexpr,
):
    """Heads, normalised if NORMS, whose first ROTARY_DIM numbers are rotated, half by half; the first half of `sin` is
    negated."""
    x = tl.load(heads + dim, mask=valid, other=0.0)
    if NORMS:
        inverse_rms = _inverse_rms(x, HEAD_DIM, eps)
        x = _times(x, inverse_rms, weights + dim, valid)
    if ROTARY_DIM == 0:
        return x
    turns = valid & (dim < ROTARY_DIM)
    half: tl.constexpr = ROTARY_DIM // 2
    other = tl.where(dim < half, dim + half, dim - half)
    partner = tl.load(heads + other, mask=turns, other=0.0)
    if NORMS:
        partner = _times(partner, inverse_rms, weights + other, turns)
    angle = place * ROTARY_DIM + dim
    by_cos = tl.load(cos + angle, mask=dim < ROTARY_DIM, other=1.0).to(tl.float32)
    by_sin = tl.load(sin + angle, mask=dim < ROTARY_DIM, other=0.0).to(tl.float32)
    return (x.to(tl.float32) * by_cos + partner.to(tl.float32) * by_sin).to(x.dtype)


def write_cache(
    shape: CacheShape,
    cache: LayerCache,
    batch: DeviceBatch,
    owners: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    rotation: tuple[Tensor, Tensor] | None = None,
    norm: tuple[TritonNorm, int] | None = None,
) -> Tensor:
    """Store a step's keys and values [N, kv_heads, head_dim] in a layer's cache -> the queries [N, heads, head_dim].

    `owners`, int64 [N]: the row of each place. `rotation`: cos and sin [N, ..., rotary_dim] of `TorchAngles`, by which
    queries and keys are rotated, after `norm` of the first so many heads, all of queries and keys at least."""
    return _launch(shape, cache, batch, owners, qkv, rotation, norm, 0)


def rotate_queries(
    shape: CacheShape,
    cache: LayerCache,
    batch: DeviceBatch,
    owners: Tensor,
    q: Tensor,
    rotation: tuple[Tensor, Tensor],
    norm: tuple[TritonNorm, int] | None = None,
) -> Tensor:
    """What `write_cache` returns, of a layer that stores nothing there."""
    return _launch(shape, cache, batch, owners, (q, q, q), rotation, norm, 2)


def _launch(
    shape: CacheShape,
    cache: LayerCache,
    batch: DeviceBatch,
    owners: Tensor,
    qkv: tuple[Tensor, Tensor, Tensor],
    rotation: tuple[Tensor, Tensor] | None,
    norm: tuple[TritonNorm, int] | None,
    first_kind: int,
) -> Tensor:
    q, k, v = qkv
    rotated = q if rotation is None else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    cos, sin = (q, q) if rotation is None else rotation
    numbers = batch.rows, batch.starts, batch.counts, batch.first_places, owners, batch.block_ids
    strides = batch.block_ids.stride(0), q.stride(0), k.stride(0), v.stride(0)
    rotary = 0 if rotation is None else cos.shape[-1]
    weights, eps, normed = (q, 0.0, 0) if norm is None else (norm[0].weight, norm[0].eps, norm[1])
    if batch.size:
        plan = _plan(shape, rotary, normed, first_kind) | dependent_launch(q.device)
        heads = shape.heads if rotary else shape.kv_heads
        write = _write_kernel[batch.size, (3 if rotary else 2) - first_kind, -(-heads // plan["LINES"])]
        write(q, k, v, rotated, cos, sin, weights, *cache.pointers, *numbers, *strides, eps, **plan)
    return rotated


def _plan(shape: CacheShape, rotary: int, normed: int = 0, first_kind: int = 0) -> dict[str, Any]:
    """A tile of heads, with a warp for each 256 of its numbers, 1 to 8, and twice as many for codes."""
    dims = next_power_of_2(shape.head_dim)
    most = 16 if dims < 256 or (dims == 256 and shape.codes is None) else 8
    lines = min(next_power_of_2(shape.heads if rotary else shape.kv_heads), most)
    sizes = {"HEADS": shape.heads, "KV_HEADS": shape.kv_heads, "HEAD_DIM": shape.head_dim, "ROTARY_DIM": rotary}
    sizes |= {"NORMED": normed, "FIRST_KIND": first_kind}
    tile = {"LARGEST_CODE": shape.largest_code, "LINES": lines, "DIMS": dims}
    warps = min(max(lines * dims // 256, 1), 8)
    return sizes | shape.blocks | tile | {"num_warps": warps if shape.codes is None else 2 * warps}


def specialisations() -> Iterator[Specialisation]:
    for shape in (*SHAPES, *CODED_SHAPES):
        for kind in ("bf16", "fp16"):
            least = FP8_CAPABILITY if shape.codes == torch.float8_e4m3fn else 80
            for rotary in (shape.head_dim, shape.head_dim // 2, 0):
                yield Specialisation.of_plan(_write_kernel, _types(kind, shape), _plan(shape, rotary), least=least)
            of_keys = shape.heads + shape.kv_heads
            for weights, normed in ((kind, of_keys), ("fp32", of_keys), (kind, of_keys + shape.kv_heads)):
                plan = _plan(shape, shape.head_dim, normed)
                yield Specialisation.of_plan(_write_kernel, _types(kind, shape, weights), plan, least=least)
            for normed in (0, shape.heads):
                plan = _plan(shape, shape.head_dim, normed, 2)
                yield Specialisation.of_plan(_write_kernel, _types(kind, shape), plan, least=least)


def _types(kind: str, shape: CacheShape, weights: str = "") -> dict[str, str]:
    data = dict.fromkeys(("q", "k", "v", "rotated", "cos", "sin"), f"*{kind}")
    cache = dict.fromkeys(("keys", "values"), f"*{kind if shape.codes is None else CODE_TYPES[shape.codes]}")
    numbers = dict.fromkeys(("rows", "starts", "counts", "first_places"), "*i32") | {"owners": "*i64"}
    strides = dict.fromkeys(("table_stride", "q_stride", "k_stride", "v_stride"), "i32")
    norm = {"weights": f"*{weights or kind}", "eps": "fp32"}
    return data | norm | cache | {"scales": "*fp32"} | numbers | {"block_ids": "*i64"} | strides
