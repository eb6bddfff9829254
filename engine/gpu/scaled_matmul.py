"""Products of eight-bit rows with eight-bit weights, int8 or fp8 (e4m3). Each row of both has one scale, in fp8 also
each group of inputs, by which a sum of codes is multiplied.

Few rows and outputs: inputs are split in parts, as the matrix says, added in order: rows are independent, in fp8 while
one form of `_plan` serves, or where it is to be invariant. The reference is `layers.torch_matmul.TorchInt8Matmul`, bit
for bit.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_choice import FP8_CAPABILITY
from .codes import to_codes
from .input_parts import ADDED_OUTPUTS, ENOUGH_PROGRAMS, add_parts, count_parts
from .runtime import (
    CODE_TYPES,
    DIVISIBLE,
    FP8_GROUP_SIZES,
    LARGEST_CODES,
    TRITON_TYPES,
    Specialisation,
)

_FEW_ROWS = 64
"""Rows up to which blocks are small and inputs may be split; to be measured."""
_QUANTISED = 1024
"""Numbers that a program quantises; a longer row is a program's whole."""


@triton.jit
def _quantise_kernel(
    x, codes, scales, rows, size, LARGEST_CODE: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """codes[row] = x[row] * (LARGEST_CODE / its largest), rounded; scales[row] is the number of code 1."""
    lines = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = tl.arange(0, BLOCK)
    places = lines[:, None] * size + columns[None, :]
    valid = (lines < rows)[:, None] & (columns < size)[None, :]
    wide = tl.load(x + places, mask=valid, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(wide), 1)
    rounded = to_codes(wide, largest[:, None], codes.dtype.element_ty, LARGEST_CODE)
    tl.store(codes + places, rounded, mask=valid)
    steps = tl.div_rn(largest, tl.full((BLOCK_ROWS,), LARGEST_CODE, tl.float32))
    tl.store(scales + lines, steps, mask=lines < rows)


@triton.jit
def add_codes(total, some, weights, x_scales, scales, valid, GROUPED: tl.constexpr):
    """`total` plus the product of codes [rows, inputs] and [inputs, outputs]. A group's product is scaled by its scales
    at the addresses `x_scales` [rows] and `scales` [outputs], which exist where `valid`; others are scaled at the end.
    """
    # Hopper's tensor cores add fp8 in 22 bits, so each sum is moved into float32.
    if GROUPED:
        own = tl.dot(some, weights, max_num_imprecise_acc=some.shape[1])
        total += own * tl.load(x_scales)[:, None] * tl.load(scales, mask=valid, other=0.0)[None, :]
    elif total.dtype == tl.int32:
        total = tl.dot(some, weights, total, out_dtype=tl.int32)
    else:
        total = tl.dot(some, weights, total, max_num_imprecise_acc=some.shape[1])
    return total


@triton.jit
def scale_sums(total, x_scales, scales, rows, columns, GROUPED: tl.constexpr):
    """The sums of `add_codes` with their scales, float32; `rows` and `columns` are the indices of these."""
    if not GROUPED:
        row_scale = tl.load(x_scales + rows)
        total = total.to(tl.float32) * (row_scale * tl.load(scales + columns))
    return total


@triton.jit
def _finish(
    total, x_scales, scales, bias, out, places, rows, columns, valid, BIASED: tl.constexpr, GROUPED: tl.constexpr
):
    """Stores the scaled sums `total`, with `bias`, at `places` of `out`."""
    result = scale_sums(total, x_scales, scales, rows, columns, GROUPED)
    if BIASED:
        result += tl.load(bias + columns)
    tl.store(out + places, result.to(out.dtype.element_ty), mask=valid)


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
    GROUPED: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """A tile of x [rows, inputs] times weight [outputs, inputs], of `out` [rows, outputs], in PARTS of the inputs;
    SHARED: the sums of one part, in `out` [PARTS, rows, outputs]. EVEN: blocks divide the inputs. GROUPED: a block of
    inputs is a group, with `x_scales` [rows, groups] and `scales` [groups, outputs]."""
    across = tl.cdiv(outputs, BLOCK_OUTPUTS)
    tile = tl.program_id(0)
    down, right = tl.swizzle2d(tile // across, tile % across, tl.cdiv(rows, BLOCK_ROWS), across, 8)
    lines = down * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = right * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    steps = tl.cdiv(inputs, BLOCK_INPUTS)
    part = tl.program_id(1)
    inner = tl.arange(0, BLOCK_INPUTS)
    # Lines beyond the last repeat the first ones, and are not stored.
    own_lines, own_columns = lines % rows, columns % outputs
    x_at = x + own_lines.to(tl.int64)[:, None] * inputs + inner[None, :]
    weight_at = weight + own_columns.to(tl.int64)[None, :] * inputs + inner[:, None]
    x_scales_at, scales_at = x_scales + own_lines * steps, scales + columns
    kind: tl.constexpr = tl.int32 if x.dtype.element_ty == tl.int8 else tl.float32
    total = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), kind)
    for current in range(part if SHARED else 0, part + 1 if SHARED else PARTS):
        own = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), kind)
        for step in range(steps * current // PARTS, steps * (current + 1) // PARTS):
            first = step * BLOCK_INPUTS
            if EVEN:
                some = tl.load(x_at + first)
                weights = tl.load(weight_at + first)
            else:
                some = tl.load(x_at + first, mask=inner[None, :] < inputs - first, other=0.0)
                weights = tl.load(weight_at + first, mask=inner[:, None] < inputs - first, other=0.0)
            # Scales are contiguous, so their addresses take no registers.
            own = add_codes(
                own, some, weights, x_scales_at + step, scales_at + step * outputs, columns < outputs, GROUPED
            )
        total += own
    valid = (lines < rows)[:, None] & (columns < outputs)[None, :]
    places = lines.to(tl.int64)[:, None] * outputs + columns[None, :]
    if SHARED:
        tl.store(out + part.to(tl.int64) * rows * outputs + places, total, mask=valid)
    else:
        some_rows, some_columns = own_lines[:, None], own_columns[None, :]
        _finish(total, x_scales, scales, bias, out, places, some_rows, some_columns, valid, BIASED, GROUPED)


@triton.jit
def _combine_kernel(
    parts,
    x_scales,
    scales,
    bias,
    out,
    rows,
    outputs,
    BIASED: tl.constexpr,
    GROUPED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """out [rows, outputs] = `parts` [PARTS, rows, outputs], added in ascending order and scaled."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = columns < outputs
    places = row * outputs + columns
    total = add_parts(parts, row, columns, rows, outputs, PARTS, BLOCK)
    _finish(total, x_scales, scales, bias, out, places, row, columns % outputs, valid, BIASED, GROUPED)


class QuantisedRows(NamedTuple):
    """Rows of numbers as codes times scales."""

    codes: Tensor
    """int8 or fp8 [..., inputs]."""
    scales: Tensor
    """float32 [...], one for each row; in fp8 also [..., groups], one for each group of inputs."""

    @property
    def group(self) -> int:
        """The inputs that share a scale; 0: all of a row do."""
        by_row = self.scales.dim() < self.codes.dim()
        return 0 if by_row else self.codes.shape[-1] // self.scales.shape[-1]


def scales_by_group(weight: QuantisedRows) -> Tensor:
    """The scales as `_scaled_kernel` reads them: [rows], or [groups, rows]."""
    return weight.scales.t().contiguous() if weight.group else weight.scales


def quantise_rows(x: Tensor, kind: torch.dtype, group: int = 0) -> QuantisedRows:
    """x [N, n], contiguous -> codes of `kind` [N, n]; the largest number of each row, or of each `group` of inputs,
    gets the largest code."""
    rows, size = x.shape
    lines = rows * size // (group or size)
    scales = x.new_empty((rows, size // group) if group else rows, dtype=torch.float32)
    codes = torch.empty_like(x, dtype=kind)
    if rows:
        plan = _quantise_plan(group or size)
        grid = (triton.cdiv(lines, plan["BLOCK_ROWS"]),)
        _quantise_kernel[grid](x, codes, scales, lines, group or size, LARGEST_CODES[kind], **plan)
    return QuantisedRows(codes, scales)


class TritonScaledMatmul:
    """x [N, in] -> x W^T + b [N, out] in x's dtype. W is quantised by row or group, and x is here."""

    def __init__(self, weight: QuantisedRows, bias: Tensor | None, invariant: bool = False) -> None:
        """`invariant`: rows decide nothing that orders the sums of fp8; those of int8 are exact anyway."""
        self._invariant = invariant and weight.codes.dtype != torch.int8
        self._weight = weight.codes
        self._scales = scales_by_group(weight)
        self._group = weight.group
        self._bias = None if bias is None else bias.float()

    def __call__(self, x: Tensor) -> Tensor:
        rows, (outputs, inputs) = len(x), self._weight.shape
        out = x.new_empty(rows, outputs)
        if not rows:
            return out
        codes, x_scales = quantise_rows(x.contiguous(), self._weight.dtype, self._group)
        plan = _plan(rows, outputs, inputs, self._group, self._invariant)
        grouped = bool(self._group)
        bias = self._scales if self._bias is None else self._bias
        ends = x_scales, self._weight, self._scales, bias
        sums = torch.int32 if codes.dtype == torch.int8 else torch.float32
        programs = plan["PARTS"] if plan["SHARED"] else 1
        target = x.new_empty(programs, rows, outputs, dtype=sums) if plan["SHARED"] else out
        tiles = triton.cdiv(rows, plan["BLOCK_ROWS"]) * triton.cdiv(outputs, plan["BLOCK_OUTPUTS"])
        grid, sizes = (tiles, programs), (rows, outputs, inputs)
        _scaled_kernel[grid](codes, *ends, target, *sizes, BIASED=self._bias is not None, GROUPED=grouped, **plan)
        if target is not out:
            grid = rows, triton.cdiv(outputs, ADDED_OUTPUTS)
            flags = {"BIASED": self._bias is not None, "GROUPED": grouped, "PARTS": programs, "BLOCK": ADDED_OUTPUTS}
            _combine_kernel[grid](
                target, x_scales, self._scales, bias, out, rows, outputs, **flags, num_warps=4, **_UNFUSED
            )
        return out


_UNFUSED = {"enable_fp_fusion": False}
"""Products and sums are rounded separately, as on the CPU."""


def _quantise_plan(size: int) -> dict[str, int]:
    block = triton.next_power_of_2(size)
    blocks = {"BLOCK_ROWS": max(_QUANTISED // block, 1), "BLOCK": block}
    return blocks | {"num_warps": min(max(block // 1024, 4), 32), **_UNFUSED}


def _plan(rows: int, outputs: int, inputs: int, group: int, invariant: bool = False) -> dict[str, int]:
    """The launch by the sizes of the matrix, and by whether rows are up to 16, 32, 64 or more; if it is `invariant`,
    rows decide no more than who computes parts."""
    few = rows <= _FEW_ROWS or invariant
    block = 64 if invariant else max(triton.next_power_of_2(rows), 16) if few else 128
    across = 64 if few else 128
    deep = group or 128
    parts = count_parts(outputs, inputs, across) if few else 1
    blocks = {"BLOCK_ROWS": block, "BLOCK_OUTPUTS": across, "BLOCK_INPUTS": deep, "EVEN": inputs % deep == 0}
    tiles = triton.cdiv(rows, block) * triton.cdiv(outputs, across)
    shared = parts > 1 and (not invariant or tiles < ENOUGH_PROGRAMS)
    spills = block == deep == 32  # of four warps on Hopper, where the assembler takes 64 registers and eight bytes more
    return blocks | {
        "PARTS": parts,
        "SHARED": shared,
        "num_warps": 4 if few and not spills else 8,
        "num_stages": 5 if few else 3,
        **_UNFUSED,
    }


def specialisations() -> Iterator[Specialisation]:
    """Products of few rows and many with the matrices of published models, in both kinds of codes."""
    for kind, code in CODE_TYPES.items():
        least = 80 if kind == torch.int8 else FP8_CAPABILITY
        groups = (0,) if kind == torch.int8 else (0, *FP8_GROUP_SIZES)
        for x in TRITON_TYPES.values():
            for size in (4096, 14336, 32768, *groups[1:]):
                types = {"x": f"*{x}", "codes": f"*{code}", "scales": "*fp32"}
                types |= {"rows": "i32", "size": f"i32{DIVISIBLE}"}
                plan = _quantise_plan(size) | {"LARGEST_CODE": LARGEST_CODES[kind]}
                yield Specialisation.of_plan(_quantise_kernel, types, plan, least=least)
            for group in groups:
                for rows in (1, 16, 32, 64, 65):
                    yield from _products(kind, group, x, rows, least)
                for rows in (1, 8192) if kind != torch.int8 else ():
                    yield from _products(kind, group, x, rows, least, True)


_SHAPES = ((28672, 4096), (4096, 14336), (896, 896), (896, 4864))
"""Outputs and inputs of products of Llama-3.1-8B and Qwen2.5-0.5B, with one part and with several."""


def _products(
    kind: torch.dtype, group: int, x: str, rows: int, least: int, invariant: bool = False
) -> Iterator[Specialisation]:
    for biased, (outputs, inputs) in zip((False, False, True, True), _SHAPES, strict=True):
        plan = _plan(rows, outputs, inputs, group, invariant)
        parts = plan["PARTS"] if plan["SHARED"] else 1
        single = {"rows": 1} if rows == 1 else {}  # a 1 is a constant to Triton
        sizes = ({} if single else {"rows": "i32"}) | {"outputs": f"i32{DIVISIBLE}"}
        sums = "i32" if kind == torch.int8 else "fp32"
        out = f"*{x if parts == 1 else sums}"
        types = {"x": f"*{CODE_TYPES[kind]}", "x_scales": "*fp32", "weight": f"*{CODE_TYPES[kind]}", "scales": "*fp32"}
        types |= {"bias": "*fp32", "out": out, **sizes, "inputs": f"i32{DIVISIBLE}"}
        flags = {**single, "BIASED": biased, "GROUPED": group > 0}
        yield Specialisation.of_plan(_scaled_kernel, types, plan | flags, ("mma",), least)
        if parts > 1:
            types = {"parts": f"*{sums}", "x_scales": "*fp32", "scales": "*fp32", "bias": "*fp32", "out": f"*{x}"}
            constants = flags | {"PARTS": parts, "BLOCK": ADDED_OUTPUTS}
            yield Specialisation(_combine_kernel, types | sizes, constants, {"num_warps": 4, **_UNFUSED})
