"""The products' measuring stick: both contenders compute the same, and the limit is the larger of two."""

import math

import pytest
import torch

from charonia.bench import kernels
from charonia.bench.roofline import MachinePeaks, Precision
from charonia.engine.cpu import library

pytestmark = pytest.mark.skipif(library.level() is None, reason="no C extension here")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "HIDDEN", 32)
    monkeypatch.setattr(kernels, "INNER", 64)
    monkeypatch.setattr(kernels, "VOCAB", 96)
    monkeypatch.setattr(kernels, "LAYERS", 2)
    monkeypatch.setattr(kernels, "SHAPES", ((48, 32), (32, 64)))


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("precision", ["bf16", "int8", "int4", "fp32"])
def test_both_contenders_compute_the_same(precision: Precision) -> None:
    ours, torchs = kernels.stacks(precision)
    x = torch.randn(5, 32).to(torch.float32 if precision == "fp32" else torch.bfloat16)
    assert ours.head(x).shape == (5, 96)
    assert torch.allclose(ours.head(x).float(), torchs.head(x).float(), atol=0.3)
    assert torch.allclose(ours.layers[0][0](x).float(), torchs.layers[0][0](x).float(), atol=0.3)
    assert [len(layer) for layer in ours.layers] == [2, 2]


@pytest.mark.usefixtures("small")
def test_a_slow_contender_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "HOPELESS", 0.0)
    monkeypatch.setattr(kernels.PeakMeter, "__init__", lambda *_: None)
    monkeypatch.setattr(kernels.PeakMeter, "measure", lambda _: {"int8": MachinePeaks(1e9, 1e9)})
    first, second = kernels.measure("int8", [1, 4], 2)
    assert first.torchs < math.inf == second.torchs
    assert second.ours < math.inf


def test_a_step_reads_or_computes_whichever_takes_longer() -> None:
    limits = MachinePeaks(1e9, 1e12)
    few, many = (kernels.ProductFigure(rows, 1.0, 1.0, limits) for rows in (1, 4096))
    assert few.least("int8") == kernels.numbers(1) / 1e9
    assert many.least("int8") == 2 * 4096 * kernels.numbers(4096) / 1e12
    assert kernels.numbers(1) - kernels.numbers(4096) == 151936 * 896


@pytest.mark.usefixtures("small")
def test_rows_are_timed_over_the_same_weights() -> None:
    seconds = kernels.row_seconds("int4", (1, 4), 0.01)
    assert list(seconds) == [1, 4]
    assert all(0 < value < math.inf for value in seconds.values())


def test_four_bits_are_read_with_their_scales_beside_a_head_of_eight() -> None:
    head = 151936 * 896
    assert kernels.weight_bytes("int4", 1) == 0.5625 * kernels.numbers(4096) + head
    assert kernels.weight_bytes("bf16", 4096) == 2 * kernels.numbers(4096)
