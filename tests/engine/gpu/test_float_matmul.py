"""Products with floats on the interpreter: right, and each row with the same bits among any number of others."""

from types import ModuleType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

SHAPES = {torch.float16: (130, 300), torch.float32: (20, 130)}
"""Outputs and inputs by dtype: the last blocks of both are not full."""


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.usefixtures("sums_of_a_gpu")
@pytest.mark.parametrize("biased", [True, pytest.param(False, marks=pytest.mark.proof)])
@pytest.mark.parametrize("dtype", SHAPES, ids=str)
def test_a_row_has_the_same_bits_whatever_is_beside_it(
    kernels: dict[str, ModuleType], dtype: torch.dtype, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of any size, and whether its parts are shared out or a program's whole."""
    module: Any = kernels["float_matmul"]
    monkeypatch.setattr(kernels["input_parts"], "_LEAST_INPUTS", 64)
    outputs, inputs = SHAPES[dtype]
    weight = random(outputs, inputs, dtype=dtype)
    bias = random(1, outputs, dtype=dtype)[0] if biased else None
    x = random(70, inputs, dtype=dtype)
    product = module.TritonFloatMatmul(weight, bias)
    many = product(x)
    right = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    torch.testing.assert_close(many.double(), right, rtol=2e-3, atol=3e-2 if dtype == torch.float16 else 1e-4)
    assert torch.equal(product(x[40:57]), many[40:57])
    assert torch.equal(product(x[69:]), many[69:])
    plans = [module._plan(rows, outputs, inputs, dtype) for rows in (1, 70)]
    assert all(plan["SHARED"] for plan in plans)
    with pytest.MonkeyPatch.context() as patch:
        plan = module._plan
        patch.setattr(module, "_plan", lambda *sizes: plan(*sizes) | {"SHARED": False})
        assert torch.equal(product(x[40:57]), many[40:57])


@given(
    st.integers(1, 1 << 17),
    st.integers(1, 1 << 18),
    st.integers(1, 1 << 16),
    st.sampled_from((torch.float16, torch.bfloat16, torch.float32)),
)
def test_rows_decide_nothing_that_orders_sums(
    kernels: dict[str, ModuleType], rows: int, outputs: int, inputs: int, dtype: torch.dtype
) -> None:
    module: Any = kernels["float_matmul"]
    plan, alone = (module._plan(count, outputs, inputs, dtype) for count in (rows, 1))
    assert all(plan[name] == alone[name] for name in ("PARTS", "BLOCK_INPUTS", "BLOCK_OUTPUTS", "EVEN"))
