"""Gates of heads, by C kernels, Triton's or torch: behind attention (arXiv 2505.06708) and behind recurrences, whose
heads are normalised, too."""

from typing import TYPE_CHECKING, TypeAlias, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.build_context import TensorGroup
from ..checkpoint.weights import WeightLoader
from ..cpu import library
from ..cpu.recurrent import HeadGate, HeadNorm
from ..gpu import runtime
from .linear import split_reason

if TYPE_CHECKING:
    from ..gpu.head_gate import TritonHeadGate

BuiltHeadGate: TypeAlias = Union[HeadGate, "TritonHeadGate", "TorchHeadGate"]


def build_head_gate(
    loader: WeightLoader, heads: int, size: int, column: int = 0, norm: HeadNorm | None = None
) -> BuiltHeadGate:
    """x [N, heads * size] and gates [N, width], in which they begin at `column` -> [N, heads * size]: a norm of each
    head, and its gate, or without a `norm` the gate's sigmoid alone."""
    if library.supports(loader.dtype, loader.device):
        return HeadGate(heads, size, column, loader.dtype, norm)
    if runtime.serves(loader.dtype, loader.device):
        from ..gpu.head_gate import TritonHeadGate

        return TritonHeadGate(heads, size, column, norm)
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
            return (wide * gate.sigmoid()).flatten(1).to(x.dtype)
        gate = gate.sigmoid() if norm.sigmoid else F.silu(gate)
        if norm.weight is None:
            return (wide * gate).flatten(1).to(x.dtype)
        if norm.gates_first:
            return (_normalised(wide * gate, norm.eps) * norm.weight).flatten(1).to(x.dtype)
        return (_normalised(wide, norm.eps) * norm.weight * gate).flatten(1).to(x.dtype)


class SplitHeadGate:
    """A norm of heads [groups, n], and its gate, where a group's features are shared by several ranks of `group`, of
    which each has so many `features` of one group: they add up their sums of squares. Gates begin at column 0."""

    def __init__(self, group: TensorGroup, groups: int, features: int, norm: HeadNorm) -> None:
        self._group = group
        self._groups = groups
        self._own = group.rank * groups // group.size
        self._features = features
        self._norm = norm
        self.untraceable: str | None = split_reason(group)

    def __call__(self, x: Tensor, gates: Tensor) -> Tensor:
        norm = self._norm
        assert norm.weight is not None, "without a norm nothing is to be added up"
        gate = F.silu(gates[:, : self._features].float())
        wide = x.float()
        if norm.gates_first:
            wide = wide * gate
        squares = wide.new_zeros(len(x), self._groups)
        squares[:, self._own] = wide.square().sum(-1)
        size = self._features * self._group.size // self._groups
        mean = self._group.all_reduce(squares)[:, self._own, None] / size
        out = wide * torch.rsqrt(mean + norm.eps) * norm.weight.flatten()
        return (out if norm.gates_first else out * gate).to(x.dtype)


def _normalised(x: Tensor, eps: float) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
