"""Root mean square normalisation (arXiv 1910.07467)."""

from collections.abc import Callable
from typing import TypeAlias

import torch
from torch import Tensor

Norm: TypeAlias = Callable[[Tensor], Tensor]
"""x [..., n] -> [..., n], in x's dtype."""

NormMaker: TypeAlias = Callable[[Tensor, float], Norm]
"""(weight [n] or broadcast against [..., n], eps) -> the norm."""


class RMSNorm:
    """x [..., n] / rms(x) * weight; the mean in float32, the product with the weight in x's dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps, self._scale = weight, eps, weight.shape[-1] ** -0.5

    def __call__(self, x: Tensor) -> Tensor:
        return _normalised(x, self._scale, self._eps).to(x.dtype).mul_(self._weight)


class OffsetRMSNorm:
    """Gemma's: x [..., n] / rms(x) * (1 + weight), all of it in float32."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps, self._scale = 1.0 + weight.float(), eps, weight.shape[-1] ** -0.5

    def __call__(self, x: Tensor) -> Tensor:
        return _normalised(x, self._scale, self._eps).mul_(self._weight).to(x.dtype)


def _normalised(x: Tensor, scale: float, eps: float) -> Tensor:
    """x / rms(x) in float32, in memory of its own; `scale` is n ** -0.5."""
    wide = x.to(torch.float32, copy=True)
    rms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).mul_(scale)
    return wide.mul_(rms.square_().add_(eps).rsqrt_())
