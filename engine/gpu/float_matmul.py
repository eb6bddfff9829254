"""Products with floats, in place of cuBLAS's: a row has the same bits whatever rows are beside it.

Inputs are cut as `input_parts` says; of many rows one program computes all parts. Weights are the tall side of a tile,
so tensor cores take the same instruction for one row and for thousands. The reference is torch's `linear`.
"""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import begin_dependent
from .input_parts import ADDED_OUTPUTS, ENOUGH_PROGRAMS, add_parts, count_parts
from .runtime import DIVISIBLE, TRITON_TYPES, Specialisation, dependent_launch


@triton.jit
def _float_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    outputs,
    inputs,
    BIASED: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    SHARED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """A tile of x [rows, inputs] times weight [outputs, inputs], of `out` [rows, outputs]; SHARED: the sums of one part
    of the inputs, in `out` [PARTS, rows, outputs]. EVEN: blocks divide the inputs."""
    begin_dependent(DEPENDENT)
    across = tl.cdiv(outputs, BLOCK_OUTPUTS)
    down = tl.cdiv(rows, BLOCK_ROWS)
    tile = tl.program_id(0)
    below, right = tl.swizzle2d(tile // across, tile % across, down, across, 8)
    lines = below * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    columns = right * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inner = tl.arange(0, BLOCK_INPUTS)
    # What is beyond the last line or column repeats the first ones, and is not stored.
    x_at = x + (lines % rows).to(tl.int64)[None, :] * inputs + inner[:, None]
    weight_at = weight + (columns % outputs).to(tl.int64)[:, None] * inputs + inner[None, :]
    steps = tl.cdiv(inputs, BLOCK_INPUTS)
    part = tl.program_id(1)
    total = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
    for current in range(part if SHARED else 0, part + 1 if SHARED else PARTS):
        own = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
        for step in range(steps * current // PARTS, steps * (current + 1) // PARTS):
            first = step * BLOCK_INPUTS
            if EVEN:
                some = tl.load(x_at + first)
                weights = tl.load(weight_at + first)
            else:
                some = tl.load(x_at + first, mask=inner[:, None] < inputs - first, other=0.0)
                weights = tl.load(weight_at + first, mask=inner[None, :] < inputs - first, other=0.0)
            own = tl.dot(weights, some, own, input_precision="ieee")
        total += own
    valid = (columns < outputs)[:, None] & (lines < rows)[None, :]
    places = lines.to(tl.int64)[None, :] * outputs + columns[:, None]
    if SHARED:
        tl.store(out + part.to(tl.int64) * rows * outputs + places, total, mask=valid)
    else:
        if BIASED:
            total += tl.load(bias + columns % outputs).to(tl.float32)[:, None]
        tl.store(out + places, total.to(out.dtype.element_ty), mask=valid)


@triton.jit
def _add_parts_kernel(
    parts,
    bias,
    out,
    rows,
    outputs,
    BIASED: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """out [rows, outputs] = `parts` [PARTS, rows, outputs], added in ascending order."""
    begin_dependent(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = columns < outputs
    total = add_parts(parts, row, columns, rows, outputs, PARTS, BLOCK)
    if BIASED:
        total += tl.load(bias + columns, mask=valid, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + columns, total.to(out.dtype.element_ty), mask=valid)


class TritonFloatMatmul:
    """x [N, in] -> x W^T + b [N, out] in x's dtype."""

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._weight = weight.contiguous()
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        rows, inputs = x.shape
        outputs = len(self._weight)
        out = x.new_empty(rows, outputs)
        if not rows:
            return out
        plan = _plan(rows, outputs, inputs, x.dtype)
        parts = plan["PARTS"] if plan["SHARED"] else 1
        biased = self._bias is not None
        bias = self._weight if self._bias is None else self._bias
        target = out if parts == 1 else x.new_empty(parts, rows, outputs, dtype=torch.float32)
        tiles = triton.cdiv(rows, plan["BLOCK_ROWS"]) * triton.cdiv(outputs, plan["BLOCK_OUTPUTS"])
        launch = dependent_launch(x.device)
        sizes = rows, outputs, inputs
        _float_kernel[tiles, parts](x, self._weight, bias, target, *sizes, BIASED=biased, **plan, **launch)
        if target is not out:
            ends = bias, out, rows, outputs, biased, parts, ADDED_OUTPUTS
            _add_parts_kernel[rows, triton.cdiv(outputs, ADDED_OUTPUTS)](target, *ends, num_warps=4, **launch)
        return out


def _plan(rows: int, outputs: int, inputs: int, kind: torch.dtype) -> dict[str, int]:
    """The launch: what orders sums, PARTS and BLOCK_INPUTS, by the matrix; the rest by how many rows there are."""
    # float32 has no tensor cores, and is multiplied in registers.
    wide = kind == torch.float32
    across, deep, most = (64, 32, 32) if wide else (128, 64, 128)
    parts = count_parts(outputs, inputs, across)
    block = min(max(triton.next_power_of_2(rows), 16), most)
    tiles = triton.cdiv(rows, block) * triton.cdiv(outputs, across)
    blocks = {"BLOCK_ROWS": block, "BLOCK_OUTPUTS": across, "BLOCK_INPUTS": deep, "EVEN": inputs % deep == 0}
    order = {"PARTS": parts, "SHARED": parts > 1 and tiles < ENOUGH_PROGRAMS}
    stages = 2 if wide else {16: 5, 32: 5, 64: 4, 128: 3}[block]
    return blocks | order | {"num_warps": 8 if wide or block > 32 else 4, "num_stages": stages}


_SHAPES = ((28672, 4096), (4096, 14336), (151936, 896), (896, 4864))
"""Outputs and inputs of products of Llama-3.1-8B and Qwen2.5-0.5B, with one part and with several."""


def specialisations() -> Iterator[Specialisation]:
    """Products of few rows and many, in every dtype."""
    for kind, name in TRITON_TYPES.items():
        for rows in (1, 16, 32, 64, 256, 8192):
            for biased, (outputs, inputs) in zip((False, False, True, True), _SHAPES, strict=True):
                plan = _plan(rows, outputs, inputs, kind)
                single = {"rows": 1} if rows == 1 else {}  # a 1 is a constant to Triton
                sizes = ({} if single else {"rows": "i32"}) | {"outputs": f"i32{DIVISIBLE}"}
                types = {"x": f"*{name}", "weight": f"*{name}", "bias": f"*{name}"}
                types |= {"out": "*fp32" if plan["SHARED"] else f"*{name}", **sizes, "inputs": f"i32{DIVISIBLE}"}
                wanted = () if kind == torch.float32 else ("mma",)
                yield Specialisation.of_plan(_float_kernel, types, plan | single | {"BIASED": biased}, wanted)
                if plan["SHARED"]:
                    types = {"parts": "*fp32", "bias": f"*{name}", "out": f"*{name}"} | sizes
                    constants = {**single, "BIASED": biased, "PARTS": plan["PARTS"], "BLOCK": ADDED_OUTPUTS}
                    yield Specialisation(_add_parts_kernel, types, constants, {"num_warps": 4})
