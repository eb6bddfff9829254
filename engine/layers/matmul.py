"""Matrix products with weights that never change: packed once for the CPU where that is known to be exact."""

from collections.abc import Callable
from functools import cache, partial
from typing import TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

Matmul: TypeAlias = Callable[[Tensor], Tensor]
"""x [N, in] -> x W^T + b [N, out]."""

PACKED_FOR = 32
"""Rows the packed layout is chosen for; measured to serve every number of rows."""


def prepare(weight: Tensor, bias: Tensor | None) -> Matmul:
    """The product with `weight` [out, in] and `bias` [out]. Where it is packed, `weight` is not kept."""
    if weight.device.type == "cpu" and packing_works(weight.dtype):
        return _packed(weight, bias)
    return partial(F.linear, weight=weight, bias=bias)


@cache
def packing_works(dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed product is there and agrees with F.linear: its operators are torch's private ones."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(80, 48, generator=generator).to(dtype)
    bias = torch.randn(80, generator=generator).to(dtype)
    try:
        product = _packed(weight, bias)
        inputs = [torch.randn(rows, 48, generator=generator).to(dtype) for rows in (1, 3, 64)]
        return all(_close(product(x), F.linear(x.float(), weight.float(), bias.float())) for x in inputs)
    except (RuntimeError, AttributeError):
        return False


def _close(found: Tensor, expected: Tensor) -> bool:
    """Within a few roundings of the sums' size (48 products of unit normals: about 7)."""
    return bool((found.float() - expected).abs().max() <= 32 * torch.finfo(found.dtype).eps)


def _packed(weight: Tensor, bias: Tensor | None) -> Matmul:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, PACKED_FOR)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def product(x: Tensor) -> Tensor:
        result: Tensor = multiply(x, packed, bias, "none", [], "")
        return result

    return product
