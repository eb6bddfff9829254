"""Products whose inputs are cut in parts, as the matrix alone says: few rows have a program for each part, and the sums
of parts are added in ascending order."""

import triton
import triton.language as tl

ENOUGH_PROGRAMS = 192
"""Programs that occupy a device."""
_LEAST_INPUTS = 512
"""The fewest inputs of a part."""
ADDED_OUTPUTS = 1024
"""Outputs of a row whose parts a program adds."""


def count_parts(outputs: int, inputs: int, across: int) -> int:
    """The parts for tiles of `across` outputs."""
    parts = 1
    while triton.cdiv(outputs, across) * parts < ENOUGH_PROGRAMS and inputs >= 2 * parts * _LEAST_INPUTS:
        parts *= 2
    return parts


@triton.jit
def add_parts(parts, row, columns, rows, outputs, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The sums of `row`, an int64, at `columns` [BLOCK], of `parts` [PARTS, rows, outputs]."""
    total = tl.zeros((BLOCK,), parts.dtype.element_ty)
    for part in tl.static_range(PARTS):
        total += tl.load(parts + (part * rows + row) * outputs + columns, mask=columns < outputs, other=0)
    return total
