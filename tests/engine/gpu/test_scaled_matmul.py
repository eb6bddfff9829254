"""Products in int8 and fp8 on the interpreter: int8 has the bits of torch's on the CPU."""

from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from charonia.engine.layers.torch_matmul import TorchInt8Matmul, quantize_rows

FP8 = torch.float8_e4m3fn


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 70),
    st.sampled_from((1, 60, 130)),
    st.sampled_from((16, 61, 128, 300, 1100)),
    st.sampled_from((torch.float32, torch.float16)),
    st.booleans(),
)
def test_int8_has_the_bits_of_the_cpu(
    kernels: dict[str, ModuleType], rows: int, outputs: int, inputs: int, dtype: torch.dtype, biased: bool
) -> None:
    module: Any = kernels["scaled_matmul"]
    x, weight = random(rows, inputs, dtype=dtype), random(outputs, inputs)
    x[: min(rows, 1)] = 0
    bias = random(outputs) if biased else None
    codes, scales = quantize_rows(weight)
    expected = TorchInt8Matmul(codes.t(), scales, bias)(x)
    found = module.TritonScaledMatmul(module.quantise_rows(weight, torch.int8), bias)(x)
    assert torch.equal(found, expected)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.integers(0, 70),
    st.sampled_from((1, 60, 130)),
    st.sampled_from(((32, 3), (64, 1), (128, 8))),
    st.sampled_from((torch.float32, torch.float16)),
    st.booleans(),
)
def test_groups_have_scales_of_their_own(
    kernels: dict[str, ModuleType],
    rows: int,
    outputs: int,
    groups: tuple[int, int],
    dtype: torch.dtype,
    biased: bool,
) -> None:
    """Groups of x and of the weights whose sizes differ by thousands keep three bits of fraction each."""
    module: Any = kernels["scaled_matmul"]
    group, count = groups
    sizes = 10.0 ** torch.arange(-1, 2).repeat(3)[:count].repeat_interleave(group)
    x, weight = (random(rows, group * count) * sizes).to(dtype), random(outputs, group * count) / sizes
    x[: min(rows, 1)] = 0
    bias = random(outputs) if biased else None
    codes, kept = (module.quantise_rows(each, FP8, group) for each in (x, weight))
    assert (codes.group, codes.scales.shape) == (group, (rows, count))
    wide = [(e.codes.double().unflatten(1, (count, group)) * e.scales.unsqueeze(2)).flatten(1) for e in (codes, kept)]
    for original, found in zip((x, weight), wide, strict=True):
        largest = original.double().abs().unflatten(1, (count, group)).amax(2, keepdim=True).expand(-1, -1, group)
        close = (original - found).abs() <= original.abs() / 16 + largest.flatten(1) * 2**-18
        assert bool(close.all())
    expected = wide[0] @ wide[1].t() + (0 if bias is None else bias)
    found = module.TritonScaledMatmul(kept, bias)(x)
    assert found.dtype == dtype
    torch.testing.assert_close(found, expected.to(dtype), rtol=2e-3 if dtype == torch.float16 else 1e-4, atol=1e-2)


@pytest.mark.parametrize("rows", [1, 20, 65])
def test_fp8_is_the_product_of_its_codes(kernels: dict[str, ModuleType], rows: int) -> None:
    module: Any = kernels["scaled_matmul"]
    x, weight, bias = random(rows, 1100), random(70, 1100), random(70)
    codes, scales = module.quantise_rows(x, FP8)
    largest = x.abs().amax(-1)
    torch.testing.assert_close(scales, largest / 448)
    by = torch.tensor(448.0) / largest
    assert torch.equal(codes.float(), (x * by[:, None]).to(FP8).float())
    kept = module.quantise_rows(weight, FP8)
    expected = (codes.double() * scales[:, None]) @ (kept.codes.double() * kept.scales[:, None]).t() + bias
    torch.testing.assert_close(module.TritonScaledMatmul(kept, bias)(x), expected.float(), rtol=1e-4, atol=1e-4)
