"""The logarithm of a row's sum of exponentials, in one order whatever the number of rows: torch shares the sum of few
rows among programs. The reference is torch's `logsumexp`."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .runtime import TRITON_TYPES, Specialisation

_BLOCK, _WARPS = 4096, 8


@triton.jit
def _logsumexp_kernel(logits, out, size, row_stride, BLOCK: tl.constexpr):
    """out[row] of logits[row, :size], float32: each of BLOCK columns has a sum, and these are added in a tree."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    highest = tl.full((BLOCK,), float("-inf"), tl.float32)
    for first in range(0, size, BLOCK):
        inside = columns < size - first
        x = tl.load(logits + row * row_stride + first + columns, mask=inside, other=float("-inf"))
        highest = tl.maximum(highest, x.to(tl.float32))
    top = tl.max(highest, 0)
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, size, BLOCK):
        inside = columns < size - first
        x = tl.load(logits + row * row_stride + first + columns, mask=inside, other=float("-inf"))
        total += tl.exp(x.to(tl.float32) - top)
    tl.store(out + row, top + tl.log(tl.sum(total, 0)))


def logsumexp(logits: Tensor) -> Tensor:
    """float32 [S] of logits [S, vocabulary]."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    rows, size = logits.shape
    out = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        _logsumexp_kernel[(rows,)](logits, out, size, logits.stride(0), BLOCK=_BLOCK, num_warps=_WARPS)
    return out


def specialisations() -> Iterator[Specialisation]:
    """Vocabularies of any size, in every dtype."""
    for kind in TRITON_TYPES.values():
        types = {"logits": f"*{kind}", "out": "*fp32", "size": "i32", "row_stride": "i32"}
        yield Specialisation(_logsumexp_kernel, types, {"BLOCK": _BLOCK}, {"num_warps": _WARPS})
