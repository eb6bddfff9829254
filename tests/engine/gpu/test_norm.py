"""RMS norm on the interpreter beside torch's."""

from collections import Counter
from collections.abc import Callable
from types import ModuleType

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from charonia.bench.gpu_engine import GpuWork
from charonia.bench.gpu_layers import LAYERS, LayerBench
from charonia.engine.layers.norm import TorchNorm, add_normed

DTYPES = (torch.float32, torch.float16)


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 5), st.sampled_from((1, 7, 64, 100)), st.sampled_from(DTYPES))
def test_norm_after_a_sum(kernels: dict[str, ModuleType], rows: int, size: int, dtype: torch.dtype) -> None:
    x, delta, weight = (random(count, size, dtype=dtype) for count in (rows, rows, 1))
    expected_sum = x + delta
    expected = TorchNorm(weight[0], 1e-5)(expected_sum)
    found = kernels["norm"].TritonNorm(weight[0], 1e-5).add_and_norm(x, delta)
    assert torch.equal(x, expected_sum)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("eps", [1e-5, 1e-6])
def test_a_norm_of_what_is_added_has_the_bits_of_two_launches(
    kernels: dict[str, ModuleType], dtype: torch.dtype, eps: float
) -> None:
    """Whatever the dtypes of the weights, which Gemma has in float32, and of one epsilon or two."""
    x, delta, weight = random(4, 100, dtype=dtype), random(5, 100, dtype=dtype)[:4], random(1, 100, dtype=dtype)[0]
    norm = kernels["norm"].TritonNorm
    outer, inner = norm(weight, 1e-5), norm(1.0 + weight.float(), eps)
    other = x.clone()
    expected = outer.add_and_norm(other, inner(delta))
    assert torch.equal(add_normed(outer, x, delta, inner), expected)
    assert torch.equal(x, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_of_heads_between_others(kernels: dict[str, ModuleType], dtype: torch.dtype) -> None:
    """Heads of queries and keys in a row that holds values too, each head with its own weight."""
    packed, weight = random(4, 9, 24, dtype=dtype), random(7, 24, dtype=dtype)
    expected = packed.clone()
    TorchNorm(weight, 1e-6).norm_heads(expected, 7)
    kernels["norm"].TritonNorm(weight, 1e-6).norm_heads(packed, 7)
    torch.testing.assert_close(packed, expected)


def test_norm_of_all_heads_together(kernels: dict[str, ModuleType]) -> None:
    """Of keys that stand between queries and values."""
    packed, weight = random(4, 9, 24, dtype=torch.float32), random(1, 72, dtype=torch.float32)[0]
    expected = packed.clone()
    TorchNorm(weight, 1e-6).norm_part(expected, 96)
    kernels["norm"].TritonNorm(weight, 1e-6).norm_part(packed, 96)
    torch.testing.assert_close(packed, expected)


def test_make_gpu_times_norms_of_heads_with_the_write_and_before_it(
    kernels: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    computed = Counter[str]()
    norm = kernels["norm"].TritonNorm
    norm_heads = norm.norm_heads
    monkeypatch.setattr(norm, "norm_heads", lambda *own: computed.update(["norm"]) or norm_heads(*own))

    def seconds(compute: Callable[[], object]) -> float:
        computed.update(["timed"])
        compute()
        return 1.0

    work = GpuWork(dtype="float16", batches=(1, 3), normed=(4, 2, 16))
    names = [figure.name for figure in LayerBench(work, torch.device("cpu"), seconds).head_norms()]
    assert names == [
        f"norms, rotation and write of {rows} rows, {way}" for rows in (1, 3) for way in ("one launch", "two launches")
    ]
    assert computed == {"timed": 4, "norm": 2 * LAYERS}
