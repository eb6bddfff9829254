"""RMS norm (arXiv 1910.07467), by the C kernels where they serve, else by torch."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

from ..cpu import library
from ..cpu.elementwise import FusedNorm


class TorchNorm:
    """x [..., n] / rms(x) * weight; the mean in float32, the product with the weight in the weight's dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps, self._scale = weight, eps, weight.shape[-1] ** -0.5

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
        some = x[:, :heads]
        some.copy_(self(some))


Norm: TypeAlias = TorchNorm | FusedNorm
"""x [..., n] -> [..., n], in x's dtype."""

NormFactory: TypeAlias = Callable[[Tensor, float], Norm]
"""`rms_norm` or `offset_rms_norm`: makes a norm of its weight [n], or [heads, n] for x [N, heads, n], and epsilon."""


def rms_norm(weight: Tensor, eps: float) -> Norm:
    """x / rms(x) * weight."""
    fused = library.supports(weight.dtype, weight.device)
    return FusedNorm(weight.float(), eps, weight.dtype) if fused else TorchNorm(weight, eps)


def offset_rms_norm(weight: Tensor, eps: float) -> Norm:
    """Gemma's x / rms(x) * (1 + weight), all of it in float32."""
    fused, offset = library.supports(weight.dtype, weight.device), 1.0 + weight.float()
    return FusedNorm(offset, eps, weight.dtype) if fused else TorchNorm(offset, eps)
