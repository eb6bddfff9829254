"""A mixture of experts as grouped products: choices are sorted by expert (`expert_blocks`), and each tile of a product
takes its weights from the expert that its rows go to.

The launches are the sort, gate and up with activation, down with the routing weight, and the sum over a token's choices
in order: a row depends on no other as long as one form of `_plan` serves, which it always does if they are invariant.
Weights are floats or codes as those of `scaled_matmul`, for which tokens are quantised before they are spread over
experts; `grouped_experts` has products with integers in groups. The reference is `layers.mlp.MixtureOfExperts` on a
CPU.
"""

from collections.abc import Iterator
from typing import TypeAlias

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernel_choice import FP8_CAPABILITY
from .expert_blocks import EXPERTS_AND_CHOICES, RoutedChoices, choose_block_rows, find_rows, sort_by_expert
from .gate import activate
from .grouped_experts import GroupedExpertMatrix
from .grouped_matmul import GroupedWeights
from .runtime import CODE_TYPES, DIVISIBLE, FP8_GROUP_SIZES, TRITON_TYPES, Specialisation
from .scaled_matmul import QuantisedRows, add_codes, quantise_rows, scale_sums, scales_by_group

_SUMMED = 1024
"""Columns of the result that a program sums."""


@triton.jit
def _add_product(total, some, weights, x_scales, scales, valid, SCALED: tl.constexpr, GROUPED: tl.constexpr):
    """`add_codes` of SCALED weights, or `total` and the product of floats."""
    if SCALED:
        total = add_codes(total, some, weights, x_scales, scales, valid, GROUPED)
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
    """With an ACTIVATION: out[p] = activation(gate) * up of token order[p] // PER_TOKEN, `weight` [experts, gate and
    up, outputs, inputs]. Without: out[order[p]] = routing[order[p]] * (x[p] times `weight` [experts, outputs, inputs]).

    SCALED: x and `weight` are codes, with scales for each row. GROUPED: a block of inputs is a group, with `x_scales`
    [rows, groups] and `scales` [groups, rows]."""
    across = tl.cdiv(outputs, BLOCK_OUTPUTS)
    block = tl.program_id(0) // across
    expert = tl.load(blocks + block).to(tl.int64)
    if expert >= 0:
        gated: tl.constexpr = ACTIVATION != ""
        valid, rows, places, targets = find_rows(order, blocks + block, most_blocks, PER_TOKEN, gated, BLOCK_ROWS)
        columns = tl.program_id(0) % across * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
        inner = tl.arange(0, BLOCK_INPUTS)
        size = outputs * inputs  # of a matrix: fewer than 2^31
        matrices = 2 if gated else 1
        x_at = x + rows[:, None] * inputs + inner[None, :]
        weight_at = weight + expert * matrices * size
        weight_at += (columns % outputs).to(tl.int64)[None, :] * inputs + inner[:, None]
        exists = columns < outputs
        scales += expert * matrices * outputs
        x_scales_at = x_scales + rows * tl.cdiv(inputs, BLOCK_INPUTS)
        scales_at = scales + columns
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
        mask = valid[:, None] & (columns < outputs)[None, :]
        tl.store(out + targets[:, None] * outputs + columns[None, :], total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _sum_kernel(parts, chosen, out, size, first_expert, experts, PER_TOKEN: tl.constexpr, BLOCK: tl.constexpr):
    """out[token] = the sum of parts [token, PER_TOKEN, size] whose expert is one of these `experts`."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = columns < size
    total = tl.zeros((BLOCK,), tl.float32)
    for choice in tl.static_range(PER_TOKEN):
        place = token * PER_TOKEN + choice
        expert = tl.load(chosen + place) - first_expert
        mine = (expert >= 0) & (expert < experts)
        total += tl.load(parts + place * size + columns, mask=valid & mine, other=0.0).to(tl.float32)
    tl.store(out + token * size + columns, total.to(out.dtype.element_ty), mask=valid)


class PlainExpertMatrix:
    """A matrix of all experts, one below the other, floats or codes with scales."""

    most_rows = 64

    def __init__(self, rows: Tensor | QuantisedRows) -> None:
        self._scales: Tensor | None = None
        self._group = 0
        if isinstance(rows, QuantisedRows):
            self._weight = rows.codes
            self._scales = scales_by_group(rows)
            self._group = rows.group
        else:
            self._weight = rows

    def multiply(self, x: Tensor, routed: RoutedChoices, activation: str) -> Tensor:
        """The product of `_experts_kernel` with x [N, inputs], in its dtype [choices, outputs]."""
        per_token = routed.weights.shape[1]
        plan = _plan(routed.rows, None if self._scales is None else self._group)
        outputs = len(self._weight) // routed.experts // (2 if activation else 1)
        codes = x
        x_scales = scales = routed.weights  # which nothing reads for scales of floats
        if self._scales is not None:
            codes, x_scales = quantise_rows(x.contiguous(), self._weight.dtype, self._group)
            scales = self._scales
        out = x.new_empty(routed.weights.numel(), outputs)
        most = routed.blocks.blocks.shape[1]
        sources = codes, x_scales, self._weight, scales, routed.weights, *routed.blocks, out
        flags = per_token, activation, self._scales is not None, self._group > 0
        grid = (most * triton.cdiv(outputs, plan["BLOCK_OUTPUTS"]),)
        _experts_kernel[grid](*sources, most, routed.experts, outputs, x.shape[1], *flags, **plan)
        return out


ExpertMatrix: TypeAlias = Tensor | QuantisedRows | GroupedWeights
"""A matrix of all experts, one below the other."""


def _stack(rows: ExpertMatrix) -> PlainExpertMatrix | GroupedExpertMatrix:
    return GroupedExpertMatrix(rows) if isinstance(rows, GroupedWeights) else PlainExpertMatrix(rows)


class TritonExperts:
    """Experts `numbers` of a mixture: x [N, hidden], `chosen` int64 [N, per token] among all experts, and their weights
    float32 [N, per token] -> the weighted sum over these experts [N, hidden]."""

    def __init__(
        self, gate_up: ExpertMatrix, down: ExpertMatrix, activation: str, numbers: range, invariant: bool = False
    ) -> None:
        """`gate_up` [experts * 2 * inner, hidden], `down` [experts * hidden, inner]. `invariant`: blocks have the same
        size whatever the number of tokens."""
        self._invariant = invariant
        self._gate_up = _stack(gate_up)
        self._down = _stack(down)
        self._activation = activation
        self._numbers = numbers

    def __call__(self, x: Tensor, chosen: Tensor, weights: Tensor, context: object) -> Tensor:
        rows, per_token = chosen.shape
        hidden = x.shape[1]
        out = torch.empty_like(x)
        if not rows:
            return out
        first = self._numbers.start
        count = len(self._numbers)
        mixed = self._gate_up.most_rows != self._down.most_rows  # blocks of 16 serve both
        most = 16 if mixed else self._down.most_rows
        fixed = self._invariant and x.dtype != torch.float32  # whose blocks are always small
        block = most if fixed else choose_block_rows(chosen.numel(), count, x.dtype, most)
        routed = RoutedChoices(weights.contiguous(), sort_by_expert(chosen, first, count, block), block, count)
        parts = self._down.multiply(self._gate_up.multiply(x, routed, self._activation), routed, "")
        _sum_kernel[rows, triton.cdiv(hidden, _SUMMED)](
            parts, chosen, out, hidden, first, count, per_token, _SUMMED, num_warps=4
        )
        return out


def _plan(rows: int, group: int | None) -> dict[str, int]:
    """The launch for blocks of so many rows. `group`: inputs that share a scale, 0 for whole rows; None: floats."""
    across, warps, stages = (64, 4, 4) if rows == 16 else (128, 8, 3)
    blocks = {"BLOCK_ROWS": rows, "BLOCK_OUTPUTS": across, "BLOCK_INPUTS": 64 if group is None else group or 128}
    return blocks | {"num_warps": warps, "num_stages": stages}


def specialisations() -> Iterator[Specialisation]:
    """Each mixture of `EXPERTS_AND_CHOICES`, at few rows and at many."""
    for experts, per_token in EXPERTS_AND_CHOICES:
        for dtype, kind in TRITON_TYPES.items():
            types = {"parts": f"*{kind}", "chosen": "*i64", "out": f"*{kind}", "size": f"i32{DIVISIBLE}"}
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
    plan = _plan(choose_block_rows(choices, experts, dtype, PlainExpertMatrix.most_rows), group)
    flags = {"SCALED": codes is not None, "GROUPED": bool(group)}
    constants = {"PER_TOKEN": per_token, "ACTIVATION": activation, **flags}
    wanted = () if multiplied == "fp32" else ("mma",)
    least = FP8_CAPABILITY if codes == torch.float8_e4m3fn else 80
    return Specialisation.of_plan(_experts_kernel, types, constants | plan, wanted, least)
