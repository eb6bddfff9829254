"""A mixture of experts as grouped products: rows are sorted by expert, and each tile of a product takes its weights
from the expert that its rows go to. The host learns of no routing: grids are as large as the worst one needs.

Four launches: sort and cut into blocks, gate and up with activation, down with the routing weight, and the sum over a
token's experts in the order of its choices, so a row does not depend on the rows beside it as long as one form of
`_plan` serves. Weights are floats, or codes of eight bits as those of `scaled_matmul`: then tokens are quantised before
they are spread over experts, and what goes into a down projection after it was rounded to the model's dtype. Or they
are integers in groups as those of `grouped_matmul`, with activations as they are. The reference is
`layers.mlp.MixtureOfExperts` on a CPU.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_choice import FP8_CAPABILITY
from .gate import activate
from .grouped_matmul import INTEGER_FORMS, GroupedWeights, add_group, load_inputs, weight_types
from .runtime import CODE_TYPES, DIVISIBLE, FP8_GROUP_SIZES, TRITON_TYPES, Specialisation
from .scaled_matmul import QuantisedRows, add_codes, quantise_rows, scale_sums, scales_by_group

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
def _find_rows(order, block, most_blocks, PER_TOKEN: tl.constexpr, GATED: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Which rows of the `block` are there, theirs of x, the places of their choices, and theirs of the result."""
    lines = tl.load(block + most_blocks) + tl.arange(0, BLOCK_ROWS)
    there = lines < tl.load(block + 2 * most_blocks)
    places = tl.load(order + lines, mask=there, other=0).to(tl.int64)
    if GATED:
        rows, targets = places // PER_TOKEN, lines.to(tl.int64)
    else:
        rows, targets = tl.where(there, lines, 0).to(tl.int64), places
    return there, rows, places, targets


@triton.jit
def _add_product(total, some, weights, x_scales, scales, there, SCALED: tl.constexpr, GROUPED: tl.constexpr):
    """`add_codes` of SCALED weights, or `total` and the product of floats."""
    if SCALED:
        total = add_codes(total, some, weights, x_scales, scales, there, GROUPED)
    else:
        total = tl.dot(some, weights, total, "ieee")
    return total


@triton.jit
def _experts_kernel(
    x,
    x_scales,
    weight,
    scales,
    routing,
    order,
    blocks,
    out,
    most_blocks,
    experts,
    outputs,
    inputs,
    PER_TOKEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    SCALED: tl.constexpr,
    GROUPED: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """With an ACTIVATION: out[p] = activation(gate) * up of token order[p] // PER_TOKEN, where `weight` is [experts,
    gate and up, outputs, inputs]. Without: out[order[p]] = routing[order[p]] * (x[p] times `weight` [experts, outputs,
    inputs]). SCALED: x and `weight` are codes; rows of x have `x_scales`, and those of `weight`, all below each other,
    `scales`. GROUPED: a block of inputs is a group, whose scales are in `x_scales` [rows, groups] and `scales` [groups,
    rows]."""
    across = tl.cdiv(outputs, BLOCK_OUTPUTS)
    block = tl.program_id(0) // across
    expert = tl.load(blocks + block).to(tl.int64)
    if expert >= 0:
        gated: tl.constexpr = ACTIVATION != ""
        there, rows, places, targets = _find_rows(order, blocks + block, most_blocks, PER_TOKEN, gated, BLOCK_ROWS)
        columns = tl.program_id(0) % across * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
        inner = tl.arange(0, BLOCK_INPUTS)
        size = outputs * inputs  # of a matrix: fewer than 2^31
        matrices = 2 if gated else 1
        x_at = x + rows[:, None] * inputs + inner[None, :]
        weight_at = weight + expert * matrices * size
        weight_at += (columns % outputs).to(tl.int64)[None, :] * inputs + inner[:, None]
        exists = columns < outputs
        scales += expert * matrices * outputs
        x_scales_at, scales_at = x_scales + rows * tl.cdiv(inputs, BLOCK_INPUTS), scales + columns
        kind: tl.constexpr = tl.int32 if weight.dtype.element_ty == tl.int8 else tl.float32
        total = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), kind)
        up = tl.zeros((BLOCK_ROWS, BLOCK_OUTPUTS), kind)
        for first in range(0, inputs, BLOCK_INPUTS):
            inside = inner < inputs - first
            some = tl.load(x_at + first, mask=inside[None, :], other=0.0)
            weights = tl.load(weight_at + first, mask=inside[:, None], other=0.0)
            total = _add_product(total, some, weights, x_scales_at, scales_at, exists, SCALED, GROUPED)
            if gated:
                weights = tl.load(weight_at + size + first, mask=inside[:, None], other=0.0)
                up = _add_product(up, some, weights, x_scales_at, scales_at + outputs, exists, SCALED, GROUPED)
            x_scales_at += 1
            scales_at += experts * matrices * outputs
        if SCALED:
            own_rows, own_columns = rows[:, None], (columns % outputs)[None, :]
            total = scale_sums(total, x_scales, scales, own_rows, own_columns, GROUPED)
            if gated:
                up = scale_sums(up, x_scales, scales + outputs, own_rows, own_columns, GROUPED)
        if gated:
            total = activate(total, ACTIVATION) * up
        else:
            total *= tl.load(routing + places)[:, None]
        mask = there[:, None] & (columns < outputs)[None, :]
        tl.store(out + targets[:, None] * outputs + columns[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _grouped_experts_kernel(
    x,
    codes,
    scales,
    zeros,
    factors,
    routing,
    order,
    blocks,
    out,
    most_blocks,
    experts,
    outputs,
    inputs,
    groups,
    PER_TOKEN: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BITS: tl.constexpr,
    GROUP: tl.constexpr,
    ZEROS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    """As `_experts_kernel`, with weights that `_grouped_kernel` multiplies with: those of all experts and, with an
    ACTIVATION, of gate and up are one matrix, one below the other."""
    across = tl.cdiv(outputs, BLOCK_OUTPUTS)
    block = tl.program_id(0) // across
    expert = tl.load(blocks + block).to(tl.int64)
    if expert >= 0:
        gated: tl.constexpr = ACTIVATION != ""
        there, rows, places, targets = _find_rows(order, blocks + block, most_blocks, PER_TOKEN, gated, BLOCK_ROWS)
        columns = tl.program_id(0) % across * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
        length: tl.constexpr = GROUP * BITS // 8
        matrices = 2 if gated else 1
        own = expert * matrices * outputs + columns % outputs
        x_at = x + rows[None, :] * inputs
        total = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
        up = tl.zeros((BLOCK_OUTPUTS, BLOCK_ROWS), tl.float32)
        for group in range(0, groups):
            inner = group * GROUP + tl.arange(0, length)
            some = load_inputs(x_at, inner, inputs)
            later = load_inputs(x_at, inner + length, inputs) if BITS == 4 else some
            at = group * experts * matrices * outputs + own
            total = add_group(total, codes, scales, zeros, at, some, later, BITS, GROUP, ZEROS)
            if gated:
                up = add_group(up, codes, scales, zeros, at + outputs, some, later, BITS, GROUP, ZEROS)
        total *= tl.load(factors + own)[:, None]
        if gated:
            total = activate(total, ACTIVATION) * (up * tl.load(factors + own + outputs)[:, None])
        else:
            total *= tl.load(routing + places)[None, :]
        mask = (columns < outputs)[:, None] & there[None, :]
        tl.store(out + targets[None, :] * outputs + columns[:, None], total.to(out.dtype.element_ty), mask=mask)


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


class _Routed(NamedTuple):
    """What is chosen: `weights` float32 [N, per token], those of choices in `blocks` of at most `rows` for so many
    `experts`."""

    weights: Tensor
    blocks: _Blocks
    rows: int
    experts: int


class _Stack:
    """A matrix of all experts, one below the other, floats or codes with scales."""

    most_rows = 64

    def __init__(self, rows: Tensor | QuantisedRows) -> None:
        self._scales: Tensor | None = None
        self._group = 0
        if isinstance(rows, QuantisedRows):
            self._weight, self._scales, self._group = rows.codes, scales_by_group(rows), rows.group
        else:
            self._weight = rows

    def multiply(self, x: Tensor, routed: _Routed, activation: str) -> Tensor:
        """The product of `_experts_kernel` with x [N, inputs], in its dtype [choices, outputs]."""
        choices, per_token = routed.weights.numel(), routed.weights.shape[1]
        plan = _plan(routed.rows, None if self._scales is None else self._group)
        outputs = len(self._weight) // routed.experts // (2 if activation else 1)
        codes, x_scales, scales = x, routed.weights, routed.weights  # which nothing reads for scales of floats
        if self._scales is not None:
            (codes, x_scales), scales = quantise_rows(x.contiguous(), self._weight.dtype, self._group), self._scales
        out, most = x.new_empty(choices, outputs), routed.blocks.blocks.shape[1]
        sources = codes, x_scales, self._weight, scales, routed.weights, *routed.blocks, out
        flags = per_token, activation, self._scales is not None, self._group > 0
        grid = (most * triton.cdiv(outputs, plan["BLOCK_OUTPUTS"]),)
        _experts_kernel[grid](*sources, most, routed.experts, outputs, x.shape[1], *flags, **plan)
        return out


class _GroupedStack:
    """A `_Stack` of integers in groups, which take registers until they are multiplied."""

    most_rows = 32

    def __init__(self, weights: GroupedWeights) -> None:
        self._weights = weights

    def multiply(self, x: Tensor, routed: _Routed, activation: str) -> Tensor:
        choices, per_token = routed.weights.numel(), routed.weights.shape[1]
        form = self._weights.form
        plan = _grouped_plan(routed.rows, form.group_size)
        outputs = form.outputs // routed.experts // (2 if activation else 1)
        out, most = x.new_empty(choices, outputs), routed.blocks.blocks.shape[1]
        sources = x.contiguous(), *self._weights.arrays, routed.weights, *routed.blocks, out
        sizes = most, routed.experts, outputs, form.inputs, form.groups
        grid = (most * triton.cdiv(outputs, plan["BLOCK_OUTPUTS"]),)
        flags = per_token, activation, form.bits, form.group_size, self._weights.kind
        _grouped_experts_kernel[grid](*sources, *sizes, *flags, **plan)
        return out


ExpertMatrix: TypeAlias = Tensor | QuantisedRows | GroupedWeights
"""A matrix of all experts, one below the other."""


def _stack(rows: ExpertMatrix) -> _Stack | _GroupedStack:
    return _GroupedStack(rows) if isinstance(rows, GroupedWeights) else _Stack(rows)


class TritonExperts:
    """The experts of these `numbers`: x [N, hidden], `chosen` int64 [N, per token], any number, and their weights,
    float32 [N, per token] -> the weighted sum of those that are here [N, hidden]."""

    def __init__(self, gate_up: ExpertMatrix, down: ExpertMatrix, activation: str, numbers: range) -> None:
        """`gate_up` [experts * 2 * inner, hidden], `down` [experts * hidden, inner]."""
        self._gate_up, self._down, self._activation, self._numbers = _stack(gate_up), _stack(down), activation, numbers

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, context: object) -> Tensor:
        (rows, per_token), hidden, out = chosen.shape, x.shape[1], torch.empty_like(x)
        if not rows:
            return out
        first, count = self._numbers.start, len(self._numbers)
        mixed = self._gate_up.most_rows != self._down.most_rows  # blocks of 16 serve both
        block = _block_rows(chosen.numel(), count, x.dtype, 16 if mixed else self._down.most_rows)
        routed = _Routed(weights.contiguous(), _align(chosen, first, count, block), block, count)
        parts = self._down.multiply(self._gate_up.multiply(x, routed, self._activation), routed, "")
        _sum_kernel[rows, triton.cdiv(hidden, _SUMMED)](
            parts, chosen, out, hidden, first, count, per_token, _SUMMED, num_warps=4
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


def _block_rows(choices: int, experts: int, kind: torch.dtype, most: int) -> int:
    """16 where an expert has few on average, else `most`: its weights are read once for each block. float32 has no
    tensor cores."""
    return 16 if choices <= 16 * experts or kind == torch.float32 else most


def _plan(rows: int, group: int | None) -> dict[str, int]:
    """By rows of a block. `group`: of codes with scales, or 0; None: floats."""
    across, warps, stages = (64, 4, 4) if rows == 16 else (128, 8, 3)
    blocks = {"BLOCK_ROWS": rows, "BLOCK_OUTPUTS": across, "BLOCK_INPUTS": 64 if group is None else group or 128}
    return blocks | {"num_warps": warps, "num_stages": stages}


def _grouped_plan(rows: int, group: int) -> dict[str, int]:
    stages = 4 if rows == 16 and group > 16 else 3  # with more, registers spill
    return {"BLOCK_ROWS": rows, "BLOCK_OUTPUTS": 64, "num_warps": 4, "num_stages": stages}


def specialisations() -> Iterator[Specialisation]:
    """Mixtral 8x7B (8 experts, 2 a token) and Qwen3-30B-A3B (128, 8), at few rows and at many."""
    number = f"i32{DIVISIBLE}"
    for experts, per_token in ((8, 2), (128, 8)):
        types = {"chosen": "*i64", "order": "*i32", "blocks": "*i32", "choices": "i32"}
        types |= dict.fromkeys(("first_expert", "experts", "most_blocks"), "i32")
        for rows in (16, _GroupedStack.most_rows, _Stack.most_rows):
            constants = {"BLOCK_ROWS": rows, "BINS": experts, "BLOCK": _SORTED}
            yield Specialisation(_align_kernel, types, constants, {"num_warps": 4})
        for dtype, kind in TRITON_TYPES.items():
            types = {"parts": f"*{kind}", "chosen": "*i64", "out": f"*{kind}", "size": number}
            types |= {"first_expert": "i32", "experts": "i32"}
            constants = {"PER_TOKEN": per_token, "BLOCK": _SUMMED}
            yield Specialisation(_sum_kernel, types, constants, {"num_warps": 4})
            for rows in (1, 64):
                for activation in ("silu", ""):
                    yield _product(dtype, None, None, rows * experts, experts, per_token, activation)
                    yield _product(dtype, torch.int8, 0, rows * experts, experts, per_token, activation)
                    for group in (0, *FP8_GROUP_SIZES):
                        forms = dtype, torch.float8_e4m3fn, group
                        yield _product(*forms, rows * experts, experts, per_token, activation)
                    for bits, group, zeros in INTEGER_FORMS if dtype != torch.float32 and experts == 128 else ():
                        yield _grouped_product(dtype, (bits, group, zeros), rows * experts, experts, activation)


def _product(
    dtype: torch.dtype,
    codes: torch.dtype | None,
    group: int | None,
    choices: int,
    experts: int,
    per_token: int,
    activation: str,
) -> Specialisation:
    kind = TRITON_TYPES[dtype]
    multiplied = kind if codes is None else CODE_TYPES[codes]
    types = {"x": f"*{multiplied}", "x_scales": "*fp32", "weight": f"*{multiplied}", "scales": "*fp32"}
    types |= {"routing": "*fp32", "order": "*i32", "blocks": "*i32", "out": f"*{kind}", "most_blocks": "i32"}
    types |= dict.fromkeys(("experts", "outputs", "inputs"), f"i32{DIVISIBLE}")
    if experts % 16:
        types["experts"] = "i32"
    plan = _plan(_block_rows(choices, experts, dtype, _Stack.most_rows), group)
    options = {name: plan.pop(name) for name in ("num_warps", "num_stages")}
    flags = {"SCALED": codes is not None, "GROUPED": bool(group)}
    constants = {"PER_TOKEN": per_token, "ACTIVATION": activation, **flags, **plan}
    wanted = () if multiplied == "fp32" else ("mma",)
    least = FP8_CAPABILITY if codes == torch.float8_e4m3fn else 80
    return Specialisation(_experts_kernel, types, constants, options, wanted, least)


def _grouped_product(
    dtype: torch.dtype, form: tuple[int, int, int], choices: int, experts: int, activation: str
) -> Specialisation:
    bits, group, zeros = form
    types = {"x": f"*{TRITON_TYPES[dtype]}", **weight_types(zeros), "routing": "*fp32", "order": "*i32"}
    types |= {"blocks": "*i32", "out": f"*{TRITON_TYPES[dtype]}", "most_blocks": "i32"}
    types |= dict.fromkeys(("experts", "outputs", "inputs", "groups"), f"i32{DIVISIBLE}")
    plan = _grouped_plan(_block_rows(choices, experts, dtype, _GroupedStack.most_rows), group)
    options = {name: plan.pop(name) for name in ("num_warps", "num_stages")}
    constants = {"PER_TOKEN": 8, "ACTIVATION": activation, "BITS": bits, "GROUP": group, "ZEROS": zeros, **plan}
    return Specialisation(_grouped_experts_kernel, types, constants, options, ("mma",))
