"""Weights of four bits: how they are chosen, and torch's product with them.

A group of inputs of each output shares a scale; its sixteen numbers are -8 to 7 times that. Symmetric: for the demo
model zero points were no better (perplexity 1.012 of bf16's against 1.010, before any calibration), and they cost a
tenth more bytes.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from ..cpu import library
from ..cpu.matmul import INT4_ZERO_POINT, GroupedRows

GROUP_SIZE = 32
"""Inputs that share a scale; a larger one saves three eighths of a bit at most."""

BYTES = 0.5625
"""The bytes of a packed weight, its share of the scale included."""

_LARGEST = (-8.25, -8.0, -7.75, -7.25, -6.75, -6.25)
"""What a group's largest number may become before it is rounded: its scale is the best of these."""

_BLOCK = 1 << 17
"""Numbers quantised at a time: few enough for the processor's caches."""

_PRECISION = 2048.0
"""Scales are kept with eleven bits."""


def quantize_int4(rows: Tensor, importance: Tensor | None = None) -> GroupedRows:
    """The four bits that stand for `rows` [n, inputs], any float dtype: of each group those with the least squared
    error, of which input i counts `importance`[i] times, the mean of its squares (float32)."""
    count, inputs = rows.shape
    groups = -(-inputs // GROUP_SIZE)
    codes = torch.empty(count, inputs, dtype=torch.uint8, device=rows.device)
    scales = torch.empty(count, groups, device=rows.device)
    counts = torch.ones(inputs, device=rows.device) if importance is None else importance.to(rows.device)
    counts = _grouped(counts.unsqueeze(0))
    if rows.device.type == "cpu" and library.level() is not None:
        wide = rows.float().contiguous()
        addresses = counts.data_ptr(), codes.data_ptr(), scales.data_ptr()
        library.bind_function("charonia_quantise_int4")(wide.data_ptr(), inputs, count, inputs, *addresses)
        return GroupedRows(codes, scales)
    for first in range(0, count, step := max(_BLOCK // inputs, 1)):
        some = slice(first, first + step)
        some_codes, some_scales = _quantize_groups(_grouped(rows[some].float()), counts)
        codes[some] = some_codes.flatten(1)[:, :inputs].to(torch.uint8)
        scales[some] = some_scales.squeeze(-1)
    return GroupedRows(codes, scales)


def dequantize_int4(rows: GroupedRows) -> Tensor:
    """float32 [n, inputs]."""
    wide = (_grouped(rows.weights.float(), INT4_ZERO_POINT) - INT4_ZERO_POINT) * rows.scales.unsqueeze(-1)
    return wide.flatten(1)[:, : rows.weights.shape[1]]


def _quantize_groups(x: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """x [n, groups, size] -> numbers 0 to 15 of the same shape, and scales [n, groups, 1]."""
    largest = x.gather(-1, x.abs().argmax(-1, keepdim=True))
    inverse = torch.where(largest == 0, 0.0, largest.reciprocal()).clamp_(-3e38, 3e38)
    weighted = x * counts
    least = torch.zeros_like(largest)
    best = torch.full_like(largest, _LARGEST[1])
    for target in _LARGEST:
        numbers = (x * (inverse * target)).round_().clamp_(-8, 7)
        product = (weighted * numbers).sum(-1, keepdim=True)
        # What the best scale for these numbers takes from the squared error.
        taken = product * product / numbers.square_().mul_(counts).sum(-1, keepdim=True).clamp_(min=1e-30)
        better = taken > least
        least = torch.where(better, taken, least)
        best = torch.where(better, target, best)
    numbers = (x * (inverse * best)).round_().clamp_(-8, 7)
    sizes = (numbers.square() * counts).sum(-1, keepdim=True)
    fitted = (weighted * numbers).sum(-1, keepdim=True) / sizes
    scales = _eleven_bits(torch.where(sizes > 0, fitted, largest / best))
    return numbers.add_(INT4_ZERO_POINT), scales


def _eleven_bits(scales: Tensor) -> Tensor:
    mantissa, exponent = torch.frexp(scales)
    return torch.ldexp((mantissa * _PRECISION).round_() / _PRECISION, exponent)


def _grouped(x: Tensor, fill: float = 0) -> Tensor:
    """[n, inputs] -> [n, groups, size], the last group filled up."""
    return F.pad(x, (0, -x.shape[1] % GROUP_SIZE), value=fill).reshape(len(x), -1, GROUP_SIZE)


class TorchInt4Matmul:
    """The int4 product in torch, the reference of the kernels and their substitute on the CPU: x in any dtype, results
    in it. Activations are int8, each group by itself; the sum within a group is exact, and groups are added in float32
    in ascending order, so results have the kernels' bits."""

    def __init__(self, rows: GroupedRows, bias: Tensor | None) -> None:
        centred = _grouped(rows.weights, INT4_ZERO_POINT).to(torch.int8) - INT4_ZERO_POINT
        self._weights = centred.permute(1, 2, 0).contiguous()  # [groups, size, outputs]
        self._scales = rows.scales.t().contiguous()
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        wide = _grouped(x.float())
        largest = wide.abs().amax(-1, keepdim=True)
        by = torch.where(largest > 0, torch.tensor(127.0) / largest, 0.0).clamp_(max=3e38)
        numbers = wide.mul(by).round_().to(torch.int8)
        steps = largest.squeeze(-1) / 127
        total = torch.zeros(len(x), self._weights.shape[-1])
        for group, (weights, scales) in enumerate(zip(self._weights, self._scales, strict=True)):
            exact = torch._int_mm(numbers[:, group].contiguous(), weights).double()
            # In float64 a product of two float32 is exact: rounded after the addition, once, as a fused one is.
            total = exact.mul_(steps[:, group, None] * scales).add_(total).float()
        return (total if self._bias is None else total.add_(self._bias)).to(x.dtype)


class DequantizedMatmul:
    """The product with four-bit weights on a device without kernels of ours for it: two weights a byte in memory, made
    wide at each call, activations as they are."""

    def __init__(self, rows: GroupedRows, bias: Tensor | None) -> None:
        codes = F.pad(rows.weights, (0, -rows.weights.shape[1] % GROUP_SIZE), value=INT4_ZERO_POINT)
        self._codes = codes[:, ::2] | codes[:, 1::2] << 4
        self._inputs = rows.weights.shape[1]
        self._scales = rows.scales
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        codes = torch.stack((self._codes & 15, self._codes >> 4), -1).flatten(1)
        weight = dequantize_int4(GroupedRows(codes, self._scales))[:, : self._inputs]
        return F.linear(x, weight.to(x.dtype), self._bias)
