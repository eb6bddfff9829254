"""Sorts a router's choices by expert and cuts them into blocks, each for one expert, for the products of `experts` and
`grouped_experts`. The host learns of no routing: grids have the size of the worst one.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from .runtime import Specialisation

_SORTED = 1024
"""Choices that are loaded together."""
BLOCK_SIZES = (16, 32, 64)
"""Rows that a block may have."""
EXPERTS_AND_CHOICES = ((8, 2), (128, 8))
"""Experts, and choices of a token, of Mixtral 8x7B and Qwen3-30B-A3B, for `Specialisation`."""


@triton.jit
def _sort_kernel(
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
    """Program e is for expert `first_expert` + e. It writes to `order` the places of `chosen` [choices] that have the
    expert, ascending and behind those of the experts before it; and to `blocks` [3, most_blocks] its blocks of at most
    BLOCK_ROWS places: expert, first in `order`, end. Unused blocks get -1."""
    expert = tl.program_id(0)
    bins = tl.arange(0, BINS)
    inner = tl.arange(0, BLOCK)
    counts = tl.zeros((BINS,), tl.int32)
    for first in range(0, choices, BLOCK):
        index = tl.load(chosen + first + inner, mask=inner < choices - first, other=-1).to(tl.int32) - first_expert
        mine = (inner < choices - first) & (index >= 0) & (index < experts)
        counts += tl.histogram(tl.where(mine, index, 0), BINS, mask=mine)
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
        index = tl.load(chosen + first + inner, mask=inner < choices - first, other=-1).to(tl.int32) - first_expert
        mine = (inner < choices - first) & (index == expert)
        place = start + tl.cumsum(mine.to(tl.int32), 0) - 1
        tl.store(order + place, first + inner, mask=mine)
        start += tl.sum(mine.to(tl.int32), 0)


@triton.jit
def find_rows(order, block, most_blocks, PER_TOKEN: tl.constexpr, GATED: tl.constexpr, BLOCK_ROWS: tl.constexpr):
    """Which rows of the `block` exist, their rows of x, the places of their choices, and their rows of the result."""
    lines = tl.load(block + most_blocks) + tl.arange(0, BLOCK_ROWS)
    valid = lines < tl.load(block + 2 * most_blocks)
    places = tl.load(order + lines, mask=valid, other=0).to(tl.int64)
    if GATED:
        rows, targets = places // PER_TOKEN, lines.to(tl.int64)
    else:
        rows, targets = tl.where(valid, lines, 0).to(tl.int64), places
    return valid, rows, places, targets


class ExpertBlocks(NamedTuple):
    """Choices by expert, as `_sort_kernel` writes them."""

    order: Tensor
    """int32 [choices]."""
    blocks: Tensor
    """int32 [3, most blocks]."""


class RoutedChoices(NamedTuple):
    """The choices of N tokens."""

    weights: Tensor
    """float32 [N, per token]."""
    blocks: ExpertBlocks
    rows: int
    """Rows that a block has at most."""
    experts: int


def sort_by_expert(chosen: Tensor, first: int, experts: int, block_rows: int) -> ExpertBlocks:
    """Sort `chosen`, contiguous, by the `experts` from `first` on, in blocks of at most `block_rows`."""
    choices = chosen.numel()
    most = min(choices, choices // block_rows + experts)
    order = chosen.new_empty(choices, dtype=torch.int32)
    blocks = chosen.new_empty(3, most, dtype=torch.int32)
    sizes = choices, first, experts, most, block_rows, max(triton.next_power_of_2(experts), 2), _SORTED
    _sort_kernel[experts,](chosen, order, blocks, *sizes, num_warps=4)
    return ExpertBlocks(order, blocks)


def choose_block_rows(choices: int, experts: int, kind: torch.dtype, most: int) -> int:
    """Rows of a block: 16 where an expert has few choices on average, and for float32, which has no tensor cores; else
    `most`, since weights are read once for each block."""
    return 16 if choices <= 16 * experts or kind == torch.float32 else most


def specialisations() -> Iterator[Specialisation]:
    """Every number of rows, for each of `EXPERTS_AND_CHOICES`."""
    types = {"chosen": "*i64", "order": "*i32", "blocks": "*i32", "choices": "i32"}
    types |= dict.fromkeys(("first_expert", "experts", "most_blocks"), "i32")
    for experts, _ in EXPERTS_AND_CHOICES:
        for rows in BLOCK_SIZES:
            constants = {"BLOCK_ROWS": rows, "BINS": experts, "BLOCK": _SORTED}
            yield Specialisation(_sort_kernel, types, constants, {"num_warps": 4})
