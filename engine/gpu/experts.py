"""A mixture of experts as grouped products: rows are sorted by expert, and each tile of a product takes its weights
from the expert that its rows go to. The host learns of no routing: grids are as large as the worst one needs.

Four launches: sort and cut into blocks, gate and up with activation, down with the routing weight, and the sum over a
token's experts in the order of its choices, so a row does not depend on the rows beside it as long as one form of
`_plan` serves. The reference is `layers.mlp.MixtureOfExperts` on a CPU.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .gate import activate
from .runtime import DIVISIBLE, TRITON_TYPES, Specialisation

_SORTED = 1024
"""Choices that are looked at together."""
_SUMMED = 1024


@triton.jit
def _align_kernel(
    chosen,
    order,
    blocks,
    choices,
    first_expert,
    experts,
    most_blocks,
    BLOCK_ROWS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program e is for expert e of these `experts`, from `first_expert` on: it writes the places in `chosen` [choices]
    that have it to `order`, in ascending order behind those of the experts before it, and to `blocks` [3, most_blocks]
    its blocks of at most BLOCK_ROWS of them: expert, first in `order`, end. Blocks that nobody has get -1."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    inner = tl.arange(0, BLOCK)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, choices, BLOCK):
        found = tl.load(chosen + first + inner, mask=inner < choices - first, other=-1).to(tl.int32) - first_expert
        mine = (inner < choices - first) & (found >= 0) & (found < experts)
        counts += tl.histogram(tl.where(mine, found, 0), BINS, mask=mine)
    own_blocks = (counts + BLOCK_ROWS - 1) // BLOCK_ROWS
    start = tl.sum(tl.where(bins < expert, counts, 0), 0)
    first_block = tl.sum(tl.where(bins < expert, own_blocks, 0), 0)
    end = start + tl.sum(tl.where(bins == expert, counts, 0), 0)
    for first in range(0, tl.cdiv(end - start, BLOCK_ROWS), BLOCK):
        at, row = first_block + first + inner, start + (first + inner) * BLOCK_ROWS
        tl.store(blocks + at, expert + tl.zeros_like(row), mask=row < end)
        tl.store(blocks + most_blocks + at, row, mask=row < end)
        tl.store(blocks + 2 * most_blocks + at, end + tl.zeros_like(row), mask=row < end)
    if expert == 0:
        for first in range(tl.sum(own_blocks, 0), most_blocks, BLOCK):
            tl.store(blocks + first + inner, tl.full((BLOCK,), -1, tl.int32), mask=inner < most_blocks - first)
    for first in range(0, choices, BLOCK):
        found = tl.load(chosen + first + inner, mask=inner < choices - first, other=-1).to(tl.int32) - first_expert
        mine = (inner < choices - first) & (found == expert)
        place = start + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order + place, first + inner, mask=mine)
        start += tl.sum(mine.to(tl.int32), 0)


@triton.jit
def _experts_kernel(
    x,
    weight,
    routing,
    order,
    blocks,
    out,
    most_blocks,
    outputs,
    inputs,
    PER_TOKEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """With an ACTIVATION: out[p] = activation(gate) * up of token order[p] // PER_TOKEN, where `weight` is [experts,
    gate and up, outputs, inputs]. Without: out[order[p]] = routing[order[p]] * (x[p] times `weight` [experts, outputs,
    inputs])."""
    across = tl.cdiv(outputs, BLOCK_OUTPUTS)
    block = tl.program_id(0) // across
    expert = tl.load(blocks + block).to(tl.int64)
    if expert >= 0:
        lines = tl.load(blocks + most_blocks + block) + tl.arange(0, BLOCK_ROWS)
        there = lines < tl.load(blocks + 2 * most_blocks + block)
        gated: tl.constexpr = ACTIVATION != ""
        places = tl.load(order + lines, mask=there, other=0).to(tl.int64)
        rows = places // PER_TOKEN if gated else tl.where(there, lines, 0).to(tl.int64)
        columns = tl.program_id(0) % across * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
        inner = tl.arange(0, BLOCK_INPUTS)
        size = outputs * inputs  # of a matrix: fewer than 2^31
        matrices = 2 if gated else 1
        x_at = x + rows[:, None] * inputs + inner[None, :]
        weight_at = weight + expert * matrices * size
        weight_at += (columns % outputs).to(tl.int64)[None, :] * inputs + inner[:, None]
        total = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
        up = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), tl.float32)
        for first in range(0, inputs, BLOCK_INPUTS):
            inside = inner < inputs - first
            some = tl.load(x_at + first, mask=inside[None, :], other=0.0)
            total = tl.dot(some, tl.load(weight_at + first, mask=inside[:, None], other=0.0), total, "ieee")
            if gated:
                up = tl.dot(some, tl.load(weight_at + size + first, mask=inside[:, None], other=0.0), up, "ieee")
        if gated:
            total, targets = activate(total, ACTIVATION) * up, lines.to(tl.int64)
        else:
            total, targets = total * tl.load(routing + places)[:, None], places
        mask = there[:, None] & (columns < outputs)[None, :]
        tl.store(out + targets[:, None] * outputs + columns[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum_kernel(parts, chosen, out, size, first_expert, experts, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    """out[token] is the sum of parts [token, PER_TOKEN, size], those that these `experts` have."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    there = columns < size
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(PER_TOKEN):
        place = token * PER_TOKEN + choice
        expert = tl.load(chosen + place) - first_expert
        mine = (expert >= 0) & (expert < experts)
        total += tl.load(parts + place * size + columns, mask=there & mine, other=0.0).to(tl.float32)
    tl.store(out + token * size + columns, total.to(out.dtype.element_ty), mask=there)


class _Blocks(NamedTuple):
    """Choices by expert: `order` int32 [choices], and `blocks` int32 [3, most blocks] of rows of it (see
    `_align_kernel`)."""

    order: Tensor
    blocks: Tensor


class TritonExperts:
    """The experts from number `first` on: x [N, hidden], `chosen` int64 [N, per token], any number, and their weights,
    float32 [N, per token] -> the weighted sum of those that are here [N, hidden]."""

    def __init__(self, gate_up: Tensor, down: Tensor, activation: str, first: int) -> None:
        """`gate_up` [experts, 2 * inner, hidden], `down` [experts, hidden, inner]."""
        self._gate_up, self._down, self._activation, self._first = gate_up, down, activation, first

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, context: object) -> Tensor:
        (rows, per_token), (count, hidden, inner) = chosen.shape, self._down.shape
        out = torch.empty_like(x)
        if not rows:
            return out
        plan = _plan(chosen.numel(), count, x.dtype)
        there = _align(chosen, self._first, count, plan["BLOCK_ROWS"])
        gated, parts = x.new_empty(chosen.numel(), inner), x.new_empty(chosen.numel(), hidden)
        most, weights = there.blocks.shape[1], weights.contiguous()
        for source, matrix, target, activation in (
            (x, self._gate_up, gated, self._activation),
            (gated, self._down, parts, ""),
        ):
            sizes = most, target.shape[1], source.shape[1], per_token, activation
            grid = (most * triton.cdiv(target.shape[1], plan["BLOCK_OUTPUTS"]),)
            _experts_kernel[grid](source, matrix, weights, *there, target, *sizes, **plan)
        _sum_kernel[rows, triton.cdiv(hidden, _SUMMED)](
            parts, chosen, out, hidden, self._first, count, per_token, _SUMMED, num_warps=4
        )
        return out


def _align(chosen: Tensor, first: int, experts: int, block_rows: int) -> _Blocks:
    """The places of `chosen`, contiguous, by these experts, in blocks of at most `block_rows`."""
    choices = chosen.numel()
    most = min(choices, choices // block_rows + experts)
    order = chosen.new_empty(choices, dtype=torch.int32)
    blocks = chosen.new_empty(3, most, dtype=torch.int32)
    sizes = choices, first, experts, most, block_rows, max(triton.next_power_of_2(experts), 2), _SORTED
    _align_kernel[experts,](chosen, order, blocks, *sizes, num_warps=4)
    return _Blocks(order, blocks)


def _plan(choices: int, experts: int, kind: torch.dtype) -> dict[str, int]:
    """Blocks of 16 rows where an expert has few on average, else of 64: its weights are read once for each of them.
    float32 has no tensor cores."""
    if choices <= 16 * experts or kind == torch.float32:
        return {"BLOCK_ROWS": 16, "BLOCK_OUTPUTS": 64, "BLOCK_INPUTS": 64, "num_warps": 4, "num_stages": 4}
    return {"BLOCK_ROWS": 64, "BLOCK_OUTPUTS": 128, "BLOCK_INPUTS": 64, "num_warps": 8, "num_stages": 3}


def specialisations() -> Iterator[Specialisation]:
    """Mixtral 8x7B (8 experts, 2 a token) and Qwen3-30B-A3B (128, 8), at few rows and at many."""
    number = f"i32{DIVISIBLE}"
    for experts, per_token in ((8, 2), (128, 8)):
        types = {"chosen": "*i64", "order": "*i32", "blocks": "*i32", "choices": "i32"}
        types |= dict.fromkeys(("first_expert", "experts", "most_blocks"), "i32")
        constants = {"BLOCK_ROWS": 16, "BINS": experts, "BLOCK": _SORTED}
        yield Specialisation(_align_kernel, types, constants, {"num_warps": 4})
        for dtype, kind in TRITON_TYPES.items():
            types = {"parts": f"*{kind}", "chosen": "*i64", "out": f"*{kind}", "size": number}
            types |= {"first_expert": "i32", "experts": "i32"}
            constants = {"PER_TOKEN": per_token, "BLOCK": _SUMMED}
            yield Specialisation(_sum_kernel, types, constants, {"num_warps": 4})
            for rows in (1, 64):
                for activation in ("silu", ""):
                    yield _product(dtype, rows * experts, experts, per_token, activation)


def _product(dtype: torch.dtype, choices: int, experts: int, per_token: int, activation: str) -> Specialisation:
    kind = TRITON_TYPES[dtype]
    types = {"x": f"*{kind}", "weight": f"*{kind}", "routing": "*fp32", "order": "*i32", "blocks": "*i32"}
    types |= {"out": f"*{kind}", "most_blocks": "i32"} | dict.fromkeys(("outputs", "inputs"), f"i32{DIVISIBLE}")
    plan = _plan(choices, experts, dtype)
    options = {name: plan.pop(name) for name in ("num_warps", "num_stages")}
    wanted = () if kind == "fp32" else ("mma",)
    constants = {"PER_TOKEN": per_token, "ACTIVATION": activation, **plan}
    return Specialisation(_experts_kernel, types, constants, options, wanted)
