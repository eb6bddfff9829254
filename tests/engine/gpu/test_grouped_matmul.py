"""Products with integers in groups on the interpreter, beside the floats that they stand for."""

from types import ModuleType

import pytest
import torch

from charonia.engine.checkpoint.code_forms import CodeForm, Zeros, dequantise_codes
from charonia.engine.cpu.matmul import GroupedFormat, GroupedRows

SHAPES = {1: (70, 1100), 20: (5, 64), 65: (33, 150)}
"""By rows: outputs and inputs; some have a last group that is not full, and several parts."""


@pytest.mark.one_in(5)  # which is no divisor of 72: each shape with each kind of zeros is among them
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("rows", SHAPES)
@pytest.mark.parametrize("zeros", Zeros)
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (4, 128), (8, 16), (8, 64)])
def test_groups(
    kernels: dict[str, ModuleType], bits: int, group: int, zeros: Zeros, rows: int, dtype: torch.dtype
) -> None:
    outputs, inputs = SHAPES[rows]
    groups, generator = -(-inputs // group), torch.Generator().manual_seed(bits * group)
    codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=generator, dtype=torch.uint8)
    scales = torch.rand(outputs, groups, generator=generator).half().float() / (1 << bits)
    points = torch.randint(0, 1 << bits, (outputs, groups), generator=generator, dtype=torch.uint8)
    offsets = torch.rand(outputs, groups, generator=generator).half().float()
    stored = GroupedRows(
        codes, scales, points if zeros is Zeros.POINTS else None, offsets if zeros is Zeros.OFFSETS else None
    )
    order = torch.randperm(inputs, generator=generator) if group == 64 else None
    form = GroupedFormat(
        outputs, inputs, group, zeros is Zeros.POINTS, dtype, dtype, bits, offsets=zeros is Zeros.OFFSETS
    )
    bias = torch.randn(outputs, generator=generator).to(dtype) if bits == 4 else None
    weights = kernels["grouped_matmul"].GroupedWeights(form, torch.device("cpu"))
    for first in range(0, outputs, 40):
        weights.pack(first, GroupedRows(*(None if part is None else part[first : first + 40] for part in stored)))
    product = kernels["grouped_matmul"].TritonGroupedMatmul(weights, bias, order)
    x = torch.randn(rows, inputs, generator=generator).to(dtype)
    right = x.double() @ dequantise_codes(stored, CodeForm(bits, group, zeros, order=order)).double().t()
    right = right if bias is None else right + bias
    bound = 4 * torch.finfo(dtype).eps * (1 if dtype == torch.float16 else 8)
    assert (product(x) - right).abs().max() < bound * right.abs().max()
