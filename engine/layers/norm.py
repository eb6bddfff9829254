"""RMS norm (arXiv 1910.07467) and layer norm (arXiv 1607.06450), by the kernels of the device where they serve, else by
torch."""

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, TypeAlias, Union

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cpu import library
from ..cpu.elementwise import FusedNorm
from ..gpu import runtime

if TYPE_CHECKING:
    from ..gpu.norm import TritonNorm


class TorchNorm:
    """x [..., n] / rms(x) * weight; the mean in float32, the product with the weight in the weight's dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight = weight
        self._eps = eps
        self._scale = weight.shape[-1] ** -0.5

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32, copy=True)
        rms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).mul_(self._scale)
        wide.mul_(rms.square_().add_(self._eps).rsqrt_())
        return wide.to(self._weight.dtype).mul_(self._weight).to(x.dtype)

    def add_and_norm(self, x: Tensor, delta: Tensor) -> Tensor:
        """Adds `delta` to x [N, n] in place; returns the norm of the sum."""
        return self(x.add_(delta))

    def norm_heads(self, x: Tensor, heads: int) -> None:
        """Normalizes the first `heads` of x [N, more heads, n] in place."""
        part = x[:, :heads]
        part.copy_(self(part))

    def norm_part(self, x: Tensor, first: int) -> None:
        """Normalizes n numbers of each token's, from number `first` on, of x [N, heads, size] in place."""
        part = x.flatten(1)[:, first : first + self._weight.shape[-1]]
        part.copy_(self(part))


class TorchLayerNorm:
    """(x - mean(x)) / deviation(x) * weight + bias."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float) -> None:
        self._weight = weight
        self._bias = bias
        self._eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)

    def add_and_norm(self, x: Tensor, delta: Tensor) -> Tensor:
        """Adds `delta` to x [N, n] in place; returns the norm of the sum."""
        return self(x.add_(delta))


WholeNorm: TypeAlias = Union[TorchLayerNorm, TorchNorm, FusedNorm, "TritonNorm"]
"""x [N, n] -> [N, n], in x's dtype."""

Norm: TypeAlias = Union[TorchNorm, FusedNorm, "TritonNorm"]
"""x [..., n] -> [..., n], in x's dtype."""


class QKNorm(NamedTuple):
    """The norm of the first `heads` of packed queries, keys and values [N, heads, head_dim]; a call is in place."""

    norm: Norm
    heads: int

    def __call__(self, packed: Tensor) -> None:
        self.norm.norm_heads(packed, self.heads)


NormFactory: TypeAlias = Callable[[Tensor, float], Norm]
"""`rms_norm`, for one: makes a norm of its weight [n], or [heads, n] for x [N, heads, n], and epsilon."""


def rms_norm(weight: Tensor, eps: float) -> Norm:
    """x / rms(x) * weight."""
    return _fastest_norm(weight, eps, weight)


def divided_rms_norm(weight: Tensor, eps: float, divisor: float) -> Norm:
    """x / rms(x) * weight / divisor, the division in float32."""
    return _fastest_norm(weight.float() / divisor, eps, weight)


def offset_rms_norm(weight: Tensor, eps: float) -> Norm:
    """Gemma's x / rms(x) * (1 + weight), all of it in float32."""
    return _fastest_norm(1.0 + weight.float(), eps, weight)


def add_normed(norm: Norm, x: Tensor, delta: Tensor, inner: Norm) -> Tensor:
    """`norm.add_and_norm` of x and inner(delta), by one kernel where there is one."""
    if isinstance(norm, TorchNorm | FusedNorm) or isinstance(inner, TorchNorm | FusedNorm):
        return norm.add_and_norm(x, inner(delta))
    return norm.add_normed(x, delta, inner)


def layer_norm(weight: Tensor, bias: Tensor, eps: float) -> WholeNorm:
    if library.supports(weight.dtype, weight.device):
        return FusedNorm(weight.float(), eps, weight.dtype, bias.float())
    return TorchLayerNorm(weight, bias, eps)


def _fastest_norm(scale: Tensor, eps: float, like: Tensor) -> Norm:
    """The norm times `scale` of hidden states that are `like` the weights that a checkpoint has for it."""
    if runtime.serves(like.dtype, like.device):
        from ..gpu.norm import TritonNorm

        return TritonNorm(scale, eps)
    if library.supports(like.dtype, like.device):
        return FusedNorm(scale.float(), eps, like.dtype)
    return TorchNorm(scale, eps)
