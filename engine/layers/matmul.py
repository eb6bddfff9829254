"""Matrix products with weights that never change: packed once for the CPU, quantised on the way if asked for.

Where the C kernels are, a row's result does not depend on the rows beside it. torch's own products, which serve
elsewhere, promise that for int8 alone.
"""

from collections.abc import Callable, Iterable
from functools import cache, partial
from typing import NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from ..checkpoint.weights import TensorSlice, WeightLoader
from ..cpu import library
from ..cpu.matmul import MatmulFormat, PackedMatmul

Matmul: TypeAlias = Callable[[Tensor], Tensor]
"""x [N, in] -> x W^T + b [N, out]."""

ONEDNN_PACKED_ROWS = 32
"""Rows oneDNN's packed layout is chosen for; measured to serve every number of rows."""

INT8_MAX = 127
"""Of a quantised number."""


class MatmulUse(NamedTuple):
    """What a product is for: whether its weights may be quantised, and whether our kernels give its results as the
    float32 that they sum in; torch's are in x's dtype in any case."""

    quantizable: bool = True
    float32: bool = False


LAYER = MatmulUse()
ROUTER = MatmulUse(quantizable=False, float32=True)
"""Small, and decides: the last bit of a score may choose another expert."""
LM_HEAD = MatmulUse(float32=True)


def build_matmul(
    load: WeightLoader, pieces: Iterable[TensorSlice], bias: Tensor | None = None, use: MatmulUse = LAYER
) -> Matmul:
    """The product with the matrices `pieces`, one below the other, and `bias` [out]."""
    quantized, pieces = load.quantized and use.quantizable, list(pieces)
    if library.supports(load.dtype, load.device):
        return _kernel_matmul(load, pieces, bias, torch.int8 if quantized else load.dtype, use)
    if quantized:
        return _int8_matmul(load, pieces, bias)
    if use is LM_HEAD:
        [table] = pieces
        return torch_matmul(load.mapped(table), bias)  # it may be the embedding's: mapped, there is one of it
    return torch_matmul(load.concatenate(pieces), bias)


def _kernel_matmul(
    load: WeightLoader, pieces: list[TensorSlice], bias: Tensor | None, kept: torch.dtype, use: MatmulUse
) -> PackedMatmul:
    out = torch.float32 if use.float32 else load.dtype
    packed = PackedMatmul(MatmulFormat(_total_rows(pieces), pieces[0].width, kept, load.dtype, out), bias, load.memory)
    for tile in load.tiles(pieces):
        packed.pack(tile.first, tile.rows)
    return packed


def _total_rows(pieces: list[TensorSlice]) -> int:
    return sum(len(piece.row_range) for piece in pieces)


class TorchInt8Matmul:
    """The reference of the int8 kernels, and what serves without them: x in any dtype, results in it.

    Sums are exact integers, so rows do not depend on each other here either."""

    def __init__(self, weight: Tensor, scales: Tensor, bias: Tensor | None) -> None:
        """`weight` [in, out] in int8, `scales` [out] in float32."""
        self._weight, self._scales, self._bias = weight, scales, bias

    def __call__(self, x: Tensor) -> Tensor:
        rows, scales = quantize_rows(x)
        result = torch._int_mm(rows, self._weight).float().mul_(scales.unsqueeze(-1) * self._scales)
        return (result if self._bias is None else result.add_(self._bias)).to(x.dtype)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [N, n] -> int8 [N, n] and float32 scales [N], each row's largest number at 127."""
    wide = x.float()
    largest = wide.abs().amax(-1)
    by = torch.where(largest > 0, INT8_MAX / largest, 0.0).clamp_(max=torch.finfo(torch.float32).max)
    return wide.mul(by.unsqueeze(-1)).round_().to(torch.int8), largest / INT8_MAX


def _int8_matmul(load: WeightLoader, pieces: list[TensorSlice], bias: Tensor | None) -> Matmul:
    weight = torch.empty(_total_rows(pieces), pieces[0].width, dtype=torch.int8)
    scales = torch.empty(len(weight))
    for tile in load.tiles(pieces):
        where = slice(tile.first, tile.first + len(tile.rows))
        weight[where], scales[where] = quantize_rows(tile.rows)
    return TorchInt8Matmul(weight.t(), scales, None if bias is None else bias.float())


def torch_matmul(weight: Tensor, bias: Tensor | None) -> Matmul:
    """torch's product with `weight` [out, in] and `bias` [out]. Where oneDNN packs it, `weight` is not kept."""
    if weight.device.type == "cpu" and onednn_packing_works(weight.dtype):
        return _onednn_matmul(weight, bias)
    return partial(F.linear, weight=weight, bias=bias)


@cache
def onednn_packing_works(dtype: torch.dtype) -> bool:
    """Whether oneDNN's packed product is there and agrees with F.linear: its operators are torch's private ones."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(80, 48, generator=generator).to(dtype)
    bias = torch.randn(80, generator=generator).to(dtype)
    try:
        product = _onednn_matmul(weight, bias)
        inputs = [torch.randn(rows, 48, generator=generator).to(dtype) for rows in (1, 3, 64)]
        return all(_close(product(x), F.linear(x.float(), weight.float(), bias.float())) for x in inputs)
    except (RuntimeError, AttributeError):
        return False


def _close(found: Tensor, expected: Tensor) -> bool:
    """Within a few roundings of the sums' size (48 products of unit normals: about 7)."""
    return bool((found.float() - expected).abs().max() <= 32 * torch.finfo(found.dtype).eps)


def _onednn_matmul(weight: Tensor, bias: Tensor | None) -> Matmul:
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, ONEDNN_PACKED_ROWS)
    multiply = torch.ops.mkldnn._linear_pointwise.default

    def product(x: Tensor) -> Tensor:
        result: Tensor = multiply(x, packed, bias, "none", [], "")
        return result

    return product
