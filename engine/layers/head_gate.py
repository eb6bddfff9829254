"""Gates of heads, by C kernels or torch: behind attention (arXiv 2505.06708) and behind recurrences, whose heads are
normalised, too."""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.weights import WeightLoader
from ..cpu import library
from ..cpu.recurrent import HeadGate, HeadNorm


def build_head_gate(
    loader: WeightLoader, heads: int, size: int, column: int = 0, norm: HeadNorm | None = None
) -> "HeadGate | TorchHeadGate":
    """x [N, heads * size] and gates [N, width], in which they begin at `column` -> [N, heads * size]: a norm of each
    head, and its gate, or without a `norm` the gate's sigmoid alone."""
    if library.supports(loader.dtype, loader.device):
        return HeadGate(heads, size, column, loader.dtype, norm)
    return TorchHeadGate(heads, size, column, norm)


class TorchHeadGate:
    """The same as `HeadGate` by torch."""

    untraceable: str | None = "its heads are gated by torch"

    def __init__(self, heads: int, size: int, column: int, norm: HeadNorm | None) -> None:
        self._shape = heads, size
        self._columns = slice(column, column + heads * size)
        self._norm = norm

    def __call__(self, x: Tensor, gates: Tensor) -> Tensor:
        wide = x.float().view(-1, *self._shape)
        gate = gates[:, self._columns].float().reshape(-1, *self._shape)
        norm = self._norm
        if norm is None:
            return (wide * gate.sigmoid_()).flatten(1).to(x.dtype)
        gate = gate.sigmoid_() if norm.sigmoid else F.silu(gate)
        if norm.weight is None:
            return (wide * gate).flatten(1).to(x.dtype)
        if norm.gates_first:
            return (_normalised(wide * gate, norm.eps) * norm.weight).flatten(1).to(x.dtype)
        return (_normalised(wide, norm.eps) * norm.weight * gate).flatten(1).to(x.dtype)


def _normalised(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
