"""Products of eight-bit rows with eight-bit weights, int8 or fp8 (e4m3): each row of both has one scale, the tensor
cores sum the codes, and what the scales make of a sum is its only rounding in int8.

Activations are quantised in one kernel, row by row. Few rows read weights as fast as memory gives them: where there
are too few outputs to occupy the device, inputs are split in parts, whose sums a second kernel adds in their order.
How many parts there are depends on the matrix alone, so rows do not depend on each other: in int8, where sums are
exact, not at all, in fp8 as long as one form of `_plan` serves. The reference is `layers.linear.TorchInt8Matmul`,
bit for bit.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .codes import to_codes
from .runtime import CODE_TYPES, DIVISIBLE, FP8_CAPABILITY, LARGEST_CODES, TRITON_TYPES, Specialisation

_FEW_ROWS = 64
"""Above, blocks are large and inputs are not split; to be measured."""
_ENOUGH, _LEAST_INPUTS = 192, 512
"""Programs that occupy a device, and inputs that are worth a part."""
_COMBINED = 1024


@triton.jit
def _quantise_kernel(x, codes, scales, size, LARGEST_CODE: tl.constexpr, BLOCK: tl.constexpr):
    """codes[row] = x[row] * (LARGEST_CODE / its largest), rounded; scales[row] is what a code of 1 stands for."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    there = columns < size
    wide = tl.load(x + row * size + columns, mask=there, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(wide), 0)
    rounded = to_codes(wide, largest, codes.dtype.element_ty, LARGEST_CODE)
    tl.store(codes + row * size + columns, rounded, mask=there)
    tl.store(scales + row, tl.div_rn(largest, tl.full((), LARGEST_CODE, tl.float32)))


@triton.jit
def _finish(total, x_scales, scales, bias, out, places, rows, columns, there, BIASED: tl.constexpr):
    """Stores at `places` of `out` what the sums `total` stand for; `rows` and `columns` are the indices of theirs."""
    row_scale = tl.load(x_scales + rows)
    scale = row_scale * tl.load(scales + columns)
    result = total.to(tl.float32) * scale
    if BIASED:
        result += tl.load(bias + columns)
    tl.store(out + places, result.to(out.dtype.element_ty), mask=there)


@triton.jit
def _scaled_kernel(
    x,
    x_scales,
    weight,
    scales,
    bias,
    out,
    rows,
    outputs,
    inputs,
    BIASED: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """A tile of x [rows, inputs] times weight [outputs, inputs]: of `out` [rows, outputs], or, with several PARTS of
    the inputs, the sums of one part in `out` [PARTS, rows, outputs]. EVEN: blocks divide the inputs."""
    across = tl.cdiv(outputs, BLOCK_OUTPUTS)
    tile = tl.program_id(0)
    down, right = tl.swizzle2d(tile // across, tile % across, tl.cdiv(rows, BLOCK_ROWS), across, 8)
    lines = down * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = right * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    steps = tl.cdiv(inputs, BLOCK_INPUTS)
    part = tl.program_id(1)
    inner = tl.arange(0, BLOCK_INPUTS)
    # Lines beyond the last one are read again from the first on, and not stored.
    x_at = x + (lines % rows).to(tl.int64)[:, None] * inputs + inner[None, :]
    weight_at = weight + (columns % outputs).to(tl.int64)[None, :] * inputs + inner[:, None]
    integer: tl.constexpr = x.dtype.element_ty == tl.int8
    kind: tl.constexpr = tl.int32 if integer else tl.float32
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), kind)
    for step in range(steps * part // PARTS, steps * (part + 1) // PARTS):
        first = step * BLOCK_INPUTS
        if EVEN:
            some = tl.load(x_at + first)
            weights = tl.load(weight_at + first)
        else:
            some = tl.load(x_at + first, mask=inner[None, :] < inputs - first, other=0.0)
            weights = tl.load(weight_at + first, mask=inner[:, None] < inputs - first, other=0.0)
        if integer:
            total = tl.dot(some, weights, total, out_dtype=tl.int32)
        else:  # Hopper's tensor cores add fp8 in 22 bits: their sums are taken over into whole float32 each time
            total = tl.dot(some, weights, total, max_num_imprecise_acc=BLOCK_INPUTS)
    there = (lines < rows)[:, None] & (columns < outputs)[None, :]
    places = lines.to(tl.int64)[:, None] * outputs + columns[None, :]
    if PARTS > 1:
        tl.store(out + part.to(tl.int64) * rows * outputs + places, total, mask=there)
    else:
        some_rows, some_columns = (lines % rows)[:, None], (columns % outputs)[None, :]
        _finish(total, x_scales, scales, bias, out, places, some_rows, some_columns, there, BIASED)


@triton.jit
def _combine_kernel(
    parts, x_scales, scales, bias, out, rows, outputs, BIASED: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    """out [rows, outputs]: what the sums of `parts` [PARTS, rows, outputs] stand for, added in ascending order."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < outputs
    places = row * outputs + columns
    total = tl.zeros((BLOCK,), parts.dtype.element_ty)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + (part * rows + row) * outputs + columns, mask=there, other=0)
    _finish(total, x_scales, scales, bias, out, places, row, columns % outputs, there, BIASED)


class QuantisedRows(NamedTuple):
    """Rows `codes` [n, inputs], int8 or fp8, each multiplied with its one of `scales`, float32 [n]."""

    codes: Tensor
    scales: Tensor


def quantise_rows(x: Tensor, kind: torch.dtype) -> QuantisedRows:
    """x [N, n], contiguous -> codes of `kind` [N, n] and scales [N], each row's largest number at the largest code."""
    codes, scales = torch.empty_like(x, dtype=kind), x.new_empty(len(x), dtype=torch.float32)
    if len(x):
        _quantise_kernel[len(x),](x, codes, scales, x.shape[1], LARGEST_CODES[kind], **_quantise_plan(x.shape[1]))
    return QuantisedRows(codes, scales)


class TritonScaledMatmul:
    """x [N, in] -> x W^T + b [N, out] in x's dtype, W quantised row by row and x, here, as well."""

    def __init__(self, weight: QuantisedRows, bias: Tensor | None) -> None:
        self._weight, self._scales = weight
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        rows, (outputs, inputs) = len(x), self._weight.shape
        out = x.new_empty(rows, outputs)
        if not rows:
            return out
        codes, x_scales = quantise_rows(x.contiguous(), self._weight.dtype)
        plan = _plan(rows, outputs, inputs)
        bias = self._scales if self._bias is None else self._bias
        ends = x_scales, self._weight, self._scales, bias
        sums = torch.int32 if codes.dtype == torch.int8 else torch.float32
        target = out if plan["PARTS"] == 1 else x.new_empty(plan["PARTS"], rows, outputs, dtype=sums)
        tiles = triton.cdiv(rows, plan["BLOCK_ROWS"]) * triton.cdiv(outputs, plan["BLOCK_OUTPUTS"])
        grid, sizes = (tiles, plan["PARTS"]), (rows, outputs, inputs)
        _scaled_kernel[grid](codes, *ends, target, *sizes, BIASED=self._bias is not None, **plan)
        if target is not out:
            grid = rows, triton.cdiv(outputs, _COMBINED)
            flags = {"BIASED": self._bias is not None, "PARTS": plan["PARTS"], "BLOCK": _COMBINED}
            _combine_kernel[grid](
                target, x_scales, self._scales, bias, out, rows, outputs, **flags, num_warps=4, **_UNFUSED
            )
        return out


_UNFUSED = {"enable_fp_fusion": False}
"""A product and the sum after it are rounded each: bits are those of the CPU."""


def _quantise_plan(size: int) -> dict[str, int]:
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": min(max(block // 1024, 4), 32), **_UNFUSED}


def _plan(rows: int, outputs: int, inputs: int) -> dict[str, int]:
    """Blocks and parts by the sizes of the matrix, and of the rows whether they are up to 16, 32, 64 or more."""
    few = rows <= _FEW_ROWS
    block, across = max(triton.next_power_of_2(rows), 16) if few else 128, 64 if few else 128
    parts = 1
    while few and triton.cdiv(outputs, across) * parts < _ENOUGH and inputs >= 2 * parts * _LEAST_INPUTS:
        parts *= 2
    blocks = {"BLOCK_ROWS": block, "BLOCK_OUTPUTS": across, "BLOCK_INPUTS": 128, "EVEN": inputs % 128 == 0}
    return blocks | {"PARTS": parts, "num_warps": 4 if few else 8, "num_stages": 5 if few else 3, **_UNFUSED}


def specialisations() -> Iterator[Specialisation]:
    """Products of few rows and many with the matrices of published models, in both kinds of codes."""
    for kind, code in CODE_TYPES.items():
        least = 80 if kind == torch.int8 else FP8_CAPABILITY
        for x in TRITON_TYPES.values():
            for size in (4096, 14336, 32768):
                types = {"x": f"*{x}", "codes": f"*{code}", "scales": "*fp32", "size": f"i32{DIVISIBLE}"}
                plan = _quantise_plan(size)
                constants = {"LARGEST_CODE": LARGEST_CODES[kind], "BLOCK": plan.pop("BLOCK")}
                yield Specialisation(_quantise_kernel, types, constants, plan, least=least)
            for rows in (1, 16, 32, 64, 65):
                yield from _products(kind, x, rows, least)


_SHAPES = ((28672, 4096), (4096, 14336), (896, 896), (896, 4864))
"""Outputs and inputs of products of Llama-3.1-8B and Qwen2.5-0.5B: one part, and several."""


def _products(kind: torch.dtype, x: str, rows: int, least: int) -> Iterator[Specialisation]:
    for biased, (outputs, inputs) in zip((False, False, True, True), _SHAPES, strict=True):
        plan = _plan(rows, outputs, inputs)
        parts, one = plan["PARTS"], {"rows": 1} if rows == 1 else {}  # a 1 is a constant to Triton
        sizes = ({} if one else {"rows": "i32"}) | {"outputs": f"i32{DIVISIBLE}"}
        options = {name: plan.pop(name) for name in ("num_warps", "num_stages", "enable_fp_fusion")}
        sums = "i32" if kind == torch.int8 else "fp32"
        out = f"*{x if parts == 1 else sums}"
        types = {"x": f"*{CODE_TYPES[kind]}", "x_scales": "*fp32", "weight": f"*{CODE_TYPES[kind]}", "scales": "*fp32"}
        types |= {"bias": "*fp32", "out": out, **sizes, "inputs": f"i32{DIVISIBLE}"}
        yield Specialisation(_scaled_kernel, types, {**one, "BIASED": biased, **plan}, options, ("mma",), least)
        if parts > 1:
            types = {"parts": f"*{sums}", "x_scales": "*fp32", "scales": "*fp32", "bias": "*fp32", "out": f"*{x}"}
            constants = {**one, "BIASED": biased, "PARTS": parts, "BLOCK": _COMBINED}
            yield Specialisation(_combine_kernel, types | sizes, constants, {"num_warps": 4, **_UNFUSED})
