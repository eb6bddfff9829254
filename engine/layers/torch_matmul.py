"""Matrix products with constant weights in torch, for where no kernels of ours serve.

They promise that a row's result does not depend on the rows beside it for int8 alone.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Matmul: TypeAlias = Callable[[Tensor], Tensor]
"""x [N, in] -> x W^T + b [N, out]."""

ONEDNN_PACKED_ROWS = 32
"""The number of rows that oneDNN's packed layout is chosen for; measured to serve every number of rows."""

INT8_MAX = 127
"""The largest quantised number."""


class TorchInt8Matmul:
    """The int8 product in torch, the reference of the int8 kernels and their substitute: x in any dtype, results in it.
    Sums are exact integers, so rows do not depend on each other here either."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """`weight` [in, out] in int8, `scales` [out] in float32."""
        self._weight = weight
        self._scales = scales
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        rows, scales = quantize_rows(x)
        result = torch._int_mm(rows, self._weight).float().mul_(scales.unsqueeze(-1) * self._scales)
        return (result if self._bias is None else result.add_(self._bias)).to(x.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, n] -> int8 [N, n] and float32 scales [N], each row's largest number at 127."""
    wide = x.float()
    largest = wide.abs().amax(-1)
    by = torch.where(largest > 0, torch.tensor(float(INT8_MAX)) / largest, 0.0).clamp_(
        max=torch.finfo(torch.float32).max
    )
    return wide.mul(by.unsqueeze(-1)).round_().to(torch.int8), largest / INT8_MAX


def torch_matmul(weight: Tensor, bias: Tensor | None) -> Matmul:
    """torch's product with `weight` [out, in] and `bias` [out]. Where oneDNN packs it, `weight` is not kept."""
    if weight.device.type == "cpu" and onednn_packing_works(weight.dtype):
        return _onednn_matmul(weight, bias)
    return partial(F.linear, weight=weight, bias=bias)


@cache
def onednn_packing_works(dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed product exists and agrees with F.linear: its operators are torch's private ones."""
    if not all(hasattr(torch.ops.mkldnn, name) for name in ("_reorder_linear_weight", "_linear_pointwise")):
        return False
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(80, 48, generator=generator).to(dtype)
    bias = torch.randn(80, generator=generator).to(dtype)
    # A few roundings of the sums' size: 48 products of unit normals are about 7.
    tolerance = 32 * torch.finfo(dtype).eps
    try:
        product = _onednn_matmul(weight, bias)
        for x in (torch.randn(rows, 48, generator=generator).to(dtype) for rows in (1, 3, 64)):
            expected = F.linear(x.float(), weight.float(), bias.float())
            if (product(x).float() - expected).abs().max() > tolerance:
                return False
    except RuntimeError:
        return False
    return True


def _onednn_matmul(weight: Tensor, bias: Tensor | None) -> Matmul:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ONEDNN_PACKED_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def product(x: Tensor) -> Tensor:
        result: Tensor = multiply(x, packed, bias, "none", [], "")
        return result

    return product
