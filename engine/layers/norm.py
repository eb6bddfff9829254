"""Root mean square normalisation (arXiv 1910.07467)."""

import torch
from torch import Tensor


class RMSNorm:
    """x [..., n] / rms(x) * weight; the mean in float32, the product with the weight in x's dtype."""

    def __init__(self, weight: Tensor, eps: float) -> None:
        self._weight, self._eps, self._scale = weight, eps, len(weight) ** -0.5

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32, copy=True)
        rms = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).mul_(self._scale)
        scale = rms.square_().add_(self._eps).rsqrt_()
        return wide.mul_(scale).to(x.dtype).mul_(self._weight)
