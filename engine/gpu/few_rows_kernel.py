"""Products of few rows with weights in half precision, and the gate behind them: the launches of `few_rows.py`.

Reading the weight is all that such a product costs. It is the tall side of a tile, all rows the other one, and its
inputs are cut as `input_parts` says: so a row's bits do not depend on the rows beside it. The references are torch's
`linear` and `gate.TritonGate`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..cpu.elementwise import SQUARED_RELU
from .dependent_launch import begin_dependent
from .gate import activate, lift
from .input_parts import ADDED_OUTPUTS, add_parts, count_parts
from .runtime import DIVISIBLE, FEW_ROWS, TRITON_TYPES, Specialisation, dependent_launch


class FewRowsTile(NamedTuple):
    """A program's part of a weight, and how it is launched."""

    outputs: int
    inputs: int
    stages: int
    warps: int = 4


TILES = (FewRowsTile(64, 128, 4), FewRowsTile(128, 64, 5), FewRowsTile(64, 64, 6))
"""The first is launched; `make gpu` measures the others beside it."""


@triton.jit
def _end_product(total, above, kind: tl.constexpr, ACTIVATION: tl.constexpr):
    """What a product stores: float32 `total`, or activation(total) * above, of both as they are without a gate."""
    result = total.to(kind)
    if ACTIVATION != "":
        gated = activate(result.to(tl.float32), ACTIVATION)
        if ACTIVATION != "squared_relu":
            gated *= lift(above.to(kind).to(tl.float32), ACTIVATION)
        result = gated.to(kind)
    return result


@triton.jit
def _load_weights(weight_at, inner, inputs, first, EVEN: tl.constexpr):
    if EVEN:
        weights = tl.load(weight_at + first)
    else:
        weights = tl.load(weight_at + first, mask=(inner < inputs - first)[None, :], other=0.0)
    return weights


@triton.jit(do_not_specialize=["rows"])
def _few_rows_kernel(
    x,
    weight,
    bias,
    out,
    rows,
    size,
    inputs,
    BIASED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    EVEN: tl.constexpr,
    PARTS: tl.constexpr,
    LINES: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """Program (n, part) has columns of out [rows, size], of x [rows, inputs] times weight [size, inputs], twice as many
    with a gate: first the gates', then what they multiply. PARTS > 1: float32 sums of a part of the inputs, in
    `out` [PARTS, rows, outputs]. EVEN: blocks divide the inputs."""
    begin_dependent(DEPENDENT)
    gates: tl.constexpr = ACTIVATION != "" and ACTIVATION != "squared_relu"
    part = tl.program_id(1)
    line = tl.arange(0, LINES)
    column = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    inner = tl.arange(0, BLOCK_INPUTS)
    x_at = x + line[None, :] * inputs + inner[:, None]
    # Columns beyond the last repeat the first ones, and are not stored.
    weight_at = weight + (column % size).to(tl.int64)[:, None] * inputs + inner[None, :]
    above_at = weight_at + size.to(tl.int64) * inputs
    steps = tl.cdiv(inputs, BLOCK_INPUTS)
    total = tl.zeros((BLOCK_OUTPUTS, LINES), tl.float32)
    above = tl.zeros((BLOCK_OUTPUTS, LINES), tl.float32)
    for step in range(steps * part // PARTS, steps * (part + 1) // PARTS):
        first = step * BLOCK_INPUTS
        weights = _load_weights(weight_at, inner, inputs, first, EVEN)
        inside = line[None, :] < rows
        some = tl.load(x_at + first, mask=inside if EVEN else inside & (inner < inputs - first)[:, None], other=0.0)
        total = tl.dot(weights, some, total)
        if gates:
            above = tl.dot(_load_weights(above_at, inner, inputs, first, EVEN), some, above)
    valid = (column < size)[:, None] & (line < rows)[None, :]
    if PARTS > 1:
        width = size * (2 if gates else 1)
        places = out + (part.to(tl.int64) * rows + line[None, :]) * width + column[:, None]
        tl.store(places, total, mask=valid)
        if gates:
            tl.store(places + size, above, mask=valid)
    else:
        if BIASED:
            total += tl.load(bias + column % size).to(tl.float32)[:, None]
            if gates:
                above += tl.load(bias + size + column % size).to(tl.float32)[:, None]
        result = _end_product(total, above, out.dtype.element_ty, ACTIVATION)
        tl.store(out + line.to(tl.int64)[None, :] * size + column[:, None], result, mask=valid)


@triton.jit(do_not_specialize=["rows"])
def _end_parts_kernel(
    parts, bias, out, rows, size, BIASED: tl.constexpr, ACTIVATION: tl.constexpr, PARTS: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr = False,
):  # fmt: skip
    """out [rows, size] of `parts` [PARTS, rows, outputs], added in ascending order, as one part would be stored."""
    begin_dependent(DEPENDENT)
    gates: tl.constexpr = ACTIVATION != "" and ACTIVATION != "squared_relu"
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    width = size * (2 if gates else 1)
    valid = column < size
    total = add_parts(parts, row, column, rows, width, PARTS, BLOCK)
    above = total
    if gates:
        above = add_parts(parts, row, column + size, rows, width, PARTS, BLOCK)
    if BIASED:
        total += tl.load(bias + column, mask=valid, other=0.0).to(tl.float32)
        if gates:
            above += tl.load(bias + size + column, mask=valid, other=0.0).to(tl.float32)
    result = _end_product(total, above, out.dtype.element_ty, ACTIVATION)
    tl.store(out + row * size + column, result, mask=valid)


def multiply_few_rows(
    x: Tensor, weight: Tensor, bias: Tensor | None, activation: str = "", tile: FewRowsTile = TILES[0]
) -> Tensor:
    """x [N, in] times weight [out, in], contiguous, N from 1 to FEW_ROWS -> [N, out]; with `activation`, of
    `gate.ACTIVATIONS`, what `TritonGate` makes of that."""
    x = x.contiguous()
    rows, inputs = x.shape
    size = len(weight) // (2 if activation not in ("", SQUARED_RELU) else 1)
    plan = _plan(size, inputs, activation, tile)
    parts = plan["PARTS"]
    out = x.new_empty(rows, size)
    target = out if parts == 1 else x.new_empty(parts, rows, len(weight), dtype=torch.float32)
    biases = weight if bias is None else bias
    grid = triton.cdiv(size, plan["BLOCK_OUTPUTS"]), parts
    kinds = {"BIASED": bias is not None, "ACTIVATION": activation, **dependent_launch(x.device)}
    _few_rows_kernel[grid](x, weight, biases, target, rows, size, inputs, **kinds, **plan)
    if parts > 1:
        ends = rows, triton.cdiv(size, ADDED_OUTPUTS)
        _end_parts_kernel[ends](target, biases, out, rows, size, **kinds, PARTS=parts, BLOCK=ADDED_OUTPUTS, num_warps=4)
    return out


def _plan(size: int, inputs: int, activation: str, tile: FewRowsTile) -> dict[str, int]:
    """The launch, by the matrix alone. A gate's program has two tiles of weights, each half as deep."""
    deep = tile.inputs if activation in ("", SQUARED_RELU) else max(tile.inputs // 2, 32)
    blocks = {"LINES": FEW_ROWS, "BLOCK_OUTPUTS": tile.outputs, "BLOCK_INPUTS": deep, "EVEN": inputs % deep == 0}
    order = {"PARTS": count_parts(size, inputs, tile.outputs)}
    return blocks | order | {"num_warps": tile.warps, "num_stages": tile.stages}


_SHAPES = ((6144, 4096, ""), (4096, 14336, ""), (128256, 4096, ""), (14336, 4096, "silu"), (4864, 896, "silu"))
"""Outputs, inputs and gates of products of Llama-3.1-8B and Qwen2.5-0.5B, with one part and with several."""


def specialisations() -> Iterator[Specialisation]:
    """Products in half precision, with biases and without."""
    for kind in (TRITON_TYPES[torch.bfloat16], TRITON_TYPES[torch.float16]):
        for tile in TILES:
            for biased, (size, inputs, activation) in zip((False, True, False, False, True), _SHAPES, strict=True):
                plan: dict[str, Any] = _plan(size, inputs, activation, tile) | {
                    "BIASED": biased,
                    "ACTIVATION": activation,
                }
                types = {"x": f"*{kind}", "weight": f"*{kind}", "bias": f"*{kind}"}
                types |= {"out": f"*{kind}" if plan["PARTS"] == 1 else "*fp32", "rows": "i32"}
                types |= dict.fromkeys(("size", "inputs"), f"i32{DIVISIBLE}")
                yield Specialisation.of_plan(_few_rows_kernel, types, plan, ("mma",))
                if plan["PARTS"] > 1:
                    ends = {"parts": "*fp32", "bias": f"*{kind}", "out": f"*{kind}", "rows": "i32"}
                    ends["size"] = f"i32{DIVISIBLE}"
                    constants = {name: plan[name] for name in ("BIASED", "ACTIVATION", "PARTS")}
                    constants["BLOCK"] = ADDED_OUTPUTS
                    yield Specialisation(_end_parts_kernel, ends, constants, {"num_warps": 4})
