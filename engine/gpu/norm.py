"""RMS norm (arXiv 1910.07467) with the residual sum before it. One program holds a row in registers; the mean is taken
in float32. The reference is `layers.norm.TorchNorm`."""

from collections.abc import Iterator

import torch
import triton
import triton.language as tl
from torch import Tensor

from .dependent_launch import begin_dependent
from .runtime import TRITON_TYPES, Specialisation, dependent_launch


@triton.jit
def _norm_kernel(
    x,
    delta,
    before,
    weight,
    out,
    size,
    row_stride,
    heads,
    weights,
    eps,
    ADDS: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr = False,
):
    """out[row] = norm(x[row] + delta[row]) * weight[head % weights]; with ADDS the sum is stored in x, of NORMED deltas
    norm(delta[row]) * before in their place. Row r is head r % heads of token r // heads; heads of a token are
    adjacent."""
    begin_dependent(DEPENDENT)
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    valid = columns < size
    head = row % heads
    at = row // heads * row_stride + head * size + columns
    values = tl.load(x + at, mask=valid, other=0.0)
    if ADDS:
        change = tl.load(delta + at, mask=valid, other=0.0)
        if NORMED:
            change = _normalise(change, before + columns, valid, size, eps)
        values += change
        tl.store(x + at, values, mask=valid)
    normal = _normalise(values, weight + head % weights * size + columns, valid, size, eps)
    tl.store(out + at, normal, mask=valid)


@triton.jit
def _normalise(values, weights, valid, size, eps):
    """A row's numbers, as they are stored, times the weights that lie at `weights`."""
    wide = values.to(tl.float32)
    rms = tl.rsqrt(tl.sum(wide * wide, 0) / size + eps)
    scale = tl.load(weights, mask=valid, other=0.0)
    return ((wide * rms).to(scale.dtype) * scale).to(values.dtype)


_UNFUSED = {"enable_fp_fusion": False}
"""Else the product with the inner norm's weights and the sum behind it are rounded once, and not as by two launches."""


class TritonNorm:
    """x [N, n] -> x / rms(x) * weight [N, n], in x's dtype; `weight` [n], or [heads, n] for x [N, heads, n], in the
    dtype in which it is multiplied."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self.weight = weight.contiguous()
        self.eps = eps
        self._size = weight.shape[-1]
        self._weights = weight.numel() // self._size

    def __call__(self, x: Tensor) -> Tensor:
        """x [N, n], contiguous -> [N, n]."""
        return self._launch(x, None, torch.empty_like(x), 1)

    def add_and_norm(self, x: Tensor, delta: Tensor) -> Tensor:
        """Adds `delta` to x [N, n] in place, and returns the norm of the sum. Both are contiguous."""
        return self._launch(x, delta, torch.empty_like(x), 1)

    def add_normed(self, x: Tensor, delta: Tensor, inner: "TritonNorm") -> Tensor:
        """`add_and_norm` of inner(delta), in one launch, with the same bits."""
        if inner.eps != self.eps:
            return self.add_and_norm(x, inner(delta))
        return self._launch(x, delta, torch.empty_like(x), 1, inner.weight)

    def norm_heads(self, x: Tensor, heads: int) -> None:
        """Normalises the first `heads` of x [N, more heads, n], contiguous, in place."""
        self._launch(x, None, x, heads)

    def norm_part(self, x: Tensor, first: int) -> None:
        """Normalises n numbers of each token's, from number `first` on, of x [N, heads, size], contiguous, in place."""
        part = x.flatten(1)[:, first:]
        self._launch(part, None, part, 1)

    def _launch(self, x: Tensor, delta: Tensor | None, out: Tensor, heads: int, before: Tensor | None = None) -> Tensor:
        weight = self.weight
        arguments = x, x if delta is None else delta, weight if before is None else before, weight, out
        sizes = self._size, x.stride(0), heads, self._weights, self.eps
        if rows := len(x) * heads:
            plan = plan_rows(self._size) | _UNFUSED | dependent_launch(x.device)
            _norm_kernel[(rows,)](*arguments, *sizes, delta is not None, before is not None, **plan)
        return out


def plan_rows(size: int) -> dict[str, int]:
    """A row's block, and a warp for each 512 of its numbers, 4 to 32: with fewer the longest rows spill."""
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": min(max(block // 512, 4), 32)}


def specialisations() -> Iterator[Specialisation]:
    """Norms of heads, and of hidden states up to 16,384 numbers."""
    for kind in TRITON_TYPES.values():
        forms = (128, False), (1024, True), (4096, False), (4096, True), (16384, True)
        for size, adds, normed in (*((*form, False) for form in forms), (4096, True, True), (8192, True, True)):
            types = dict.fromkeys(("x", "delta", "before", "weight", "out"), f"*{kind}")
            types |= dict.fromkeys(("size", "row_stride", "heads", "weights"), "i32") | {"eps": "fp32"}
            plan = plan_rows(size) | _UNFUSED | {"ADDS": adds, "NORMED": normed}
            yield Specialisation.of_plan(_norm_kernel, types, plan)._replace(unwanted=("fma.rn",))
