"""Products of quantised weights, experts and sums of logits: a row has the same bits among any number of others."""

from types import ModuleType
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from charonia.engine.cpu.matmul import GroupedFormat, GroupedRows

FP8 = torch.float8_e4m3fn


def random(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.usefixtures("sums_of_a_gpu")
@pytest.mark.parametrize("group", [0, pytest.param(32, marks=pytest.mark.proof)])
def test_products_in_fp8(kernels: dict[str, ModuleType], group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether parts are shared among programs or one program's whole."""
    module: Any = kernels["scaled_matmul"]
    monkeypatch.setattr(kernels["input_parts"], "_LEAST_INPUTS", 64)
    weight = module.quantise_rows(random(70, 256), FP8, group)
    x = random(70, 256).half()
    product = module.TritonScaledMatmul(weight, None, True)
    many = product(x)
    assert torch.equal(product(x[69:]), many[69:])
    plan = module._plan
    assert plan(1, 70, 256, group, True)["SHARED"]
    monkeypatch.setattr(module, "_plan", lambda *sizes: plan(*sizes) | {"SHARED": False})
    assert torch.equal(product(x[60:]), many[60:])


@pytest.mark.usefixtures("sums_of_a_gpu")
def test_products_with_integers_in_groups(kernels: dict[str, ModuleType]) -> None:
    module: Any = kernels["grouped_matmul"]
    form = GroupedFormat(20, 64, 32, False, torch.float16, torch.float16, 4)
    weights = module.GroupedWeights(form, torch.device("cpu"))
    codes = torch.randint(0, 16, (20, 64), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    weights.pack(0, GroupedRows(codes, random(20, 2).abs(), None, None))
    x = random(70, 64).half()
    product = module.TritonGroupedMatmul(weights, None, None, True)
    many = product(x)
    assert torch.equal(product(x[69:]), many[69:])
    assert torch.equal(product(x[40:60]), many[40:60])


@pytest.mark.usefixtures("sums_of_a_gpu")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows of experts elsewhere hold anything
def test_experts(kernels: dict[str, ModuleType]) -> None:
    """So many tokens that blocks would be of another size than for a few."""
    module: Any = kernels["experts"]
    tokens, experts, hidden, inner = 40, 2, 32, 16
    gate_up, down = random(experts * 2 * inner, hidden).half(), random(experts * hidden, inner).half()
    chosen = torch.tensor([[0, 1], [1, 0]] * (tokens // 2))
    routing, x = random(tokens, 2).abs(), random(tokens, hidden).half()
    layer = module.TritonExperts(gate_up, down, "silu", range(experts), True)
    many = layer(x, chosen, routing, None)
    assert torch.equal(layer(x[39:], chosen[39:], routing[39:], None), many[39:])
    few, all_of_them = (module.choose_block_rows(2 * count, experts, x.dtype, 64) for count in (1, tokens))
    assert few != all_of_them


@pytest.mark.usefixtures("sums_of_a_gpu")
def test_sums_of_logits(kernels: dict[str, ModuleType]) -> None:
    logits = 8 * random(5, 9000)
    logits[2, :4000] = -torch.inf
    module: Any = kernels["logsumexp"]
    together = module.logsumexp(logits)
    torch.testing.assert_close(together, logits.double().logsumexp(-1).float(), rtol=1e-6, atol=1e-5)
    for row in range(5):
        assert torch.equal(module.logsumexp(logits[row : row + 1]), together[row : row + 1])


@given(st.integers(1, 1 << 17), st.integers(1, 1 << 18), st.integers(1, 1 << 10), st.sampled_from((0, 32, 128)))
def test_rows_decide_nothing_that_orders_sums_in_fp8(
    kernels: dict[str, ModuleType], rows: int, outputs: int, groups: int, group: int
) -> None:
    module: Any = kernels["scaled_matmul"]
    inputs = groups * (group or 16)
    plan, alone = (module._plan(count, outputs, inputs, group, True) for count in (rows, 1))
    assert plan | {"SHARED": False} == alone | {"SHARED": False}
