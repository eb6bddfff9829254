"""Rows of a table in the host's pinned memory, read over the bus by the tokens that need them, and added to what is on
the GPU. The reference is torch's embedding."""

from collections.abc import Iterator

import triton
import triton.language as tl
from torch import Tensor

from .runtime import DIVISIBLE, TRITON_TYPES, Specialisation

_BLOCK = 1024


@triton.jit
def _add_rows_kernel(x, table, tokens, factor, size, rows, BLOCK: tl.constexpr):
    """x[line, :size] += table[tokens[line], :size] * factor, or row 0 for tokens that have none of the `rows`."""
    line = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = columns < size
    token = tl.load(tokens + line).to(tl.int64)
    token = tl.where(token < rows, token, 0)
    row = tl.load(table + token * size + columns, mask=valid, other=0.0).to(tl.float32)
    old = tl.load(x + line * size + columns, mask=valid, other=0.0)
    tl.store(x + line * size + columns, (old.to(tl.float32) + row * factor).to(old.dtype), mask=valid)


def add_rows(x: Tensor, table: Tensor, tokens: Tensor, factor: float) -> None:
    """Adds to x [N, n] the rows `tokens` [N] of table [rows, n] times `factor`, in float32. Both are contiguous; the
    table is on the device or in pinned memory."""
    if count := len(tokens):
        grid = count, triton.cdiv(x.shape[1], _BLOCK)
        _add_rows_kernel[grid](x, table, tokens, factor, x.shape[1], len(table), _BLOCK, num_warps=4)


def specialisations() -> Iterator[Specialisation]:
    for kind in TRITON_TYPES.values():
        types = dict.fromkeys(("x", "table"), f"*{kind}") | {"tokens": "*i32", "factor": "fp32"}
        types |= {"size": f"i32{DIVISIBLE}", "rows": "i32"}
        yield Specialisation(_add_rows_kernel, types, {"BLOCK": _BLOCK}, {"num_warps": 4})
