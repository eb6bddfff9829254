"""Root mean square normalisation (arXiv 1910.07467)."""

from typing import Protocol

import torch
from torch import Tensor

from ..kernels import library
from ..kernels.elementwise import FusedNorm


class Norm(Protocol):
    """x [..., n] -> [..., n], in x's dtype."""

    def __call__(self, x: Tensor) -> Tensor: ...

    def after(self, x: Tensor, delta: Tensor) -> Tensor:
        """Adds `delta` to x [N, n] in place; the norm of the sum."""

    def within(self, x: Tensor, heads: int) -> None:
        """The first `heads` of x [N, more, n] in place."""


class NormMaker(Protocol):
    def __call__(self, weight: Tensor, eps: float) -> Norm:
        """The norm with `weight` [n], or [heads, n] for x [N, heads, n]."""


class RMSNorm:
    """x [..., n] / rms(x) * weight; the mean in float32, the product with the weight in x's dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps, self._scale = weight, eps, weight.shape[-1] ** -0.5

    def __call__(self, x: Tensor) -> Tensor:
        return _normalised(x, self._scale, self._eps).to(x.dtype).mul_(self._weight)

    def after(self, x: Tensor, delta: Tensor) -> Tensor:
        return self(x.add_(delta))

    def within(self, x: Tensor, heads: int) -> None:
        _within(self, x[:, :heads])


class OffsetRMSNorm:
    """Gemma's: x [..., n] / rms(x) * (1 + weight), all of it in float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps, self._scale = 1.0 + weight.float(), eps, weight.shape[-1] ** -0.5

    def __call__(self, x: Tensor) -> Tensor:
        return _normalised(x, self._scale, self._eps).mul_(self._weight).to(x.dtype)

    def after(self, x: Tensor, delta: Tensor) -> Tensor:
        return self(x.add_(delta))

    def within(self, x: Tensor, heads: int) -> None:
        _within(self, x[:, :heads])


def rms_norm(weight: Tensor, eps: float) -> Norm:
    """The fastest RMSNorm here."""
    fused = library.serves(weight.dtype, weight.device)
    return FusedNorm(weight.float(), eps, weight.dtype) if fused else RMSNorm(weight, eps)


def offset_rms_norm(weight: Tensor, eps: float) -> Norm:
    """The fastest OffsetRMSNorm here."""
    fused = library.serves(weight.dtype, weight.device)
    return FusedNorm(1.0 + weight.float(), eps, weight.dtype) if fused else OffsetRMSNorm(weight, eps)


def _within(norm: Norm, x: Tensor) -> None:
    x.copy_(norm(x))


def _normalised(x: Tensor, scale: float, eps: float) -> Tensor:
    """x / rms(x) in float32, in memory of its own; `scale` is n ** -0.5."""
    wide = x.to(torch.float32, copy=True)
    rms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).mul_(scale)
    return wide.mul_(rms.square_().add_(eps).rsqrt_())
