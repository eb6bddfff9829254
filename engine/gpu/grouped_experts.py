"""Products of a mixture's experts whose weights are integers in groups, as those of `grouped_matmul`, with activations
as they are."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .expert_blocks import EXPERTS_AND_CHOICES, RoutedChoices, choose_block_rows, find_rows
from .gate import activate
from .grouped_matmul import INTEGER_FORMS, GroupedWeights, add_group, load_inputs, weight_types
from .runtime import DIVISIBLE, TRITON_TYPES, Specialisation


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
    """The kernel of `experts`, with the weights that `_grouped_kernel` multiplies with: all experts and, with an
    ACTIVATION, of gate and up are one matrix, one below the other."""
    across = tl.cdiv(outputs, BLOCK_OUTPUTS)
    block = tl.program_id(0) // across
    expert = tl.load(blocks + block).to(tl.int64)
    if expert >= 0:
        gated: tl.constexpr = ACTIVATION != ""
        valid, rows, places, targets = find_rows(order, blocks + block, most_blocks, PER_TOKEN, gated, BLOCK_ROWS)
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
        mask = (columns < outputs)[:, None] & valid[None, :]
        tl.store(out + targets[None, :] * outputs + columns[:, None], total.to(out.dtype.element_ty), mask=mask)


class GroupedExpertMatrix:
    """A matrix of all experts, one below the other, of integers in groups."""

    most_rows = 32
    """Rows of a block: the integers take registers until they are multiplied."""

    def __init__(self, weights: GroupedWeights) -> None:
        self._weights = weights

    def multiply(self, x: Tensor, routed: RoutedChoices, activation: str) -> Tensor:
        """The product of `_grouped_experts_kernel` with x [N, inputs], in its dtype [choices, outputs]."""
        per_token = routed.weights.shape[1]
        form = self._weights.form
        plan = _grouped_plan(routed.rows, form.group_size)
        outputs = form.outputs // routed.experts // (2 if activation else 1)
        out = x.new_empty(routed.weights.numel(), outputs)
        most = routed.blocks.blocks.shape[1]
        sources = x.contiguous(), *self._weights.arrays, routed.weights, *routed.blocks, out
        sizes = most, routed.experts, outputs, form.inputs, form.groups
        grid = (most * triton.cdiv(outputs, plan["BLOCK_OUTPUTS"]),)
        flags = per_token, activation, form.bits, form.group_size, self._weights.kind
        _grouped_experts_kernel[grid](*sources, *sizes, *flags, **plan)
        return out


def _grouped_plan(rows: int, group: int) -> dict[str, int]:
    stages = 4 if rows == 16 and group > 16 else 3  # with more, registers spill
    return {"BLOCK_ROWS": rows, "BLOCK_OUTPUTS": 64, "num_warps": 4, "num_stages": stages}


def specialisations() -> Iterator[Specialisation]:
    """Every form of weights, for the larger mixture of `EXPERTS_AND_CHOICES`, at few rows and at many."""
    experts, per_token = EXPERTS_AND_CHOICES[-1]
    for dtype in (torch.float16, torch.bfloat16):
        for rows in (1, 64):
            for activation in ("silu", ""):
                for form in INTEGER_FORMS:
                    yield _grouped_product(dtype, form, rows * experts, experts, per_token, activation)


def _grouped_product(
    dtype: torch.dtype, form: tuple[int, int, int], choices: int, experts: int, per_token: int, activation: str
) -> Specialisation:
    bits, group, zeros = form
    types = {"x": f"*{TRITON_TYPES[dtype]}", **weight_types(zeros), "routing": "*fp32", "order": "*i32"}
    types |= {"blocks": "*i32", "out": f"*{TRITON_TYPES[dtype]}", "most_blocks": "i32"}
    types |= dict.fromkeys(("experts", "outputs", "inputs", "groups"), f"i32{DIVISIBLE}")
    plan = _grouped_plan(choose_block_rows(choices, experts, dtype, GroupedExpertMatrix.most_rows), group)
    constants = {"PER_TOKEN": per_token, "ACTIVATION": activation, "BITS": bits, "GROUP": group, "ZEROS": zeros}
    return Specialisation.of_plan(_grouped_experts_kernel, types, constants | plan, ("mma",))
