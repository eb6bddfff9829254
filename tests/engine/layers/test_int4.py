"""Four bits a weight: how they are chosen, torch's products with them, and what calibration decides."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from charonia.engine.checkpoint.build_context import BuildContext, Shard, SingleRank
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint
from charonia.engine.checkpoint.packing_cache import PackingCache, open_packing_cache
from charonia.engine.cpu import library
from charonia.engine.cpu.matmul import GroupedFormat, GroupedMatmul, GroupedRows, PackedMatmul
from charonia.engine.cpu.memory import HugePageArena
from charonia.engine.layers import product_matrix
from charonia.engine.layers.int4 import (
    GROUP_SIZE,
    DequantizedMatmul,
    TorchInt4Matmul,
    dequantize_int4,
    quantize_int4,
)
from charonia.engine.models import calibration as models_calibration
from charonia.engine.models.calibration import HIGHER_SHARE, Calibration
from charonia.engine.models.registry import checkpoint_builder

KERNELS = pytest.mark.skipif(library.level() is None, reason="no C extension here")
SHAPES = [(100, 70), (64, 896), (17, 33), (1, 1)]


@pytest.fixture(params=["kernels", "torch"])
def chooser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantising is C's or torch's."""
    if request.param == "torch":
        monkeypatch.setattr(library, "level", lambda: None)
    elif library.level() is None:
        pytest.skip("no C extension here")


def weights(outputs: int, inputs: int) -> torch.Tensor:
    return torch.randn(outputs, inputs, generator=torch.Generator().manual_seed(inputs))


def squared_error(rows: torch.Tensor, found: GroupedRows, importance: torch.Tensor | None = None) -> float:
    error = (dequantize_int4(found) - rows).square()
    return float((error if importance is None else error * importance).sum())


@pytest.mark.usefixtures("chooser")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_no_scale_of_a_group_would_have_been_much_better(dtype: torch.dtype) -> None:
    rows = weights(20, 100).to(dtype)
    found = quantize_int4(rows)
    wide = torch.nn.functional.pad(rows.float(), (0, 28)).view(20, 4, GROUP_SIZE)
    tried = (torch.linspace(-2, 2, 400) * wide.abs().amax(-1, keepdim=True) / 8).unsqueeze(-1)
    numbers = (wide.unsqueeze(-2) / tried).round().clamp(-8, 7)
    best = (numbers * tried - wide.unsqueeze(-2)).square().sum(-1).amin(-1).sum()
    assert squared_error(rows.float(), found) < 1.05 * best


@pytest.mark.usefixtures("chooser")
def test_inputs_that_matter_more_have_less_error() -> None:
    rows, importance = weights(50, 256), weights(1, 256)[0].square()
    weighed, plain = quantize_int4(rows, importance), quantize_int4(rows)
    assert squared_error(rows, weighed, importance) < 0.95 * squared_error(rows, plain, importance)
    assert squared_error(rows, weighed) > squared_error(rows, plain)


@pytest.mark.usefixtures("chooser")
def test_zeros_stay_zeros_and_what_is_no_number_shows() -> None:
    rows = weights(4, 64)
    rows[0] = 0
    rows[1, :32] = 0
    rows[2, 40] = float("nan")
    found = dequantize_int4(quantize_int4(rows))
    assert not found[0].any()
    assert not found[1, :32].any()
    assert found[2, 32:].isnan().all()
    assert found[3].isfinite().all()


@KERNELS
def test_torch_chooses_as_the_kernels_do(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = weights(100, 1000)
    rows[7] *= 1e-30
    ours = quantize_int4(rows)
    monkeypatch.setattr(library, "level", lambda: None)
    torchs = quantize_int4(rows)
    assert (ours.weights == torchs.weights).float().mean() > 0.999, "sums in another order decide near ties elsewhere"
    assert squared_error(rows, ours) == pytest.approx(squared_error(rows, torchs), rel=1e-4)


@KERNELS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_kernels_have_torchs_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    rows, bias = quantize_int4(weights(*shape)), torch.randn(shape[0], generator=torch.Generator().manual_seed(1))
    packed = GroupedMatmul(GroupedFormat(*shape, GROUP_SIZE, False, dtype, dtype), bias, HugePageArena())
    packed.pack(0, rows)
    reference = TorchInt4Matmul(rows, bias)
    for count in (1, 5, 40):
        x = weights(count, shape[1]).to(dtype)
        assert torch.equal(reference(x), packed(x))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_widened_weights_give_the_same_but_for_rounded_activations(shape: tuple[int, int]) -> None:
    rows, bias, x = quantize_int4(weights(*shape)), torch.ones(shape[0]), weights(9, shape[1])
    right = x @ dequantize_int4(rows).T + 1
    assert torch.allclose(DequantizedMatmul(rows, bias)(x), right, atol=1e-4)
    assert (TorchInt4Matmul(rows, bias)(x) - right).abs().max() < 0.02 * right.abs().max()


def test_what_costs_most_for_its_size_stays_higher() -> None:
    calibration, sizes = Calibration(), {"big": 8000, "cheap": 1000, "dear": 500, "dearer": 400}
    for name, outputs in sizes.items():
        calibration.watch(name, lambda x: x, outputs, weights(8, 32))
    plan = calibration.plan({"big": 1.0, "cheap": 1e-3, "dear": 1.0, "dearer": 1.0})
    assert plan.higher == {"dear", "dearer"}
    assert sum(sizes[each] for each in plan.higher) <= HIGHER_SHARE * sum(sizes.values())


def test_experts_of_a_layer_are_judged_together() -> None:
    calibration = Calibration()
    for layer in (0, 1):
        for expert in (0, 11):
            name = f"layers.{layer}.mlp.experts.{expert}.down_proj.weight"
            calibration.watch(name, lambda x: x, 8, weights(8, 32))
    assert [len(labels) for labels in calibration.units.values()] == [2, 2]


def test_noise_is_as_large_as_four_bits_make_it() -> None:
    calibration, rows = Calibration(), weights(64, 512)
    observed = calibration.watch("one", lambda x: x @ rows.T, 64, rows)
    x = weights(512, 300).T
    exact = observed(x)
    calibration.make_noisy("one")
    real = (x @ dequantize_int4(quantize_int4(rows)).T - exact).square().mean()
    assert torch.allclose((observed(x) - exact).square().mean(), real, rtol=0.1)


def build(directory: Path, **changes: object) -> list[object]:
    """The products of the model's layers."""
    made: list[object] = []
    context = BuildContext(torch.bfloat16, torch.device("cpu"), 64, quantization="int4")._replace(**changes)  # type: ignore[arg-type]
    before = product_matrix.ProductMatrix.packed

    def noting(matrix: product_matrix.ProductMatrix, bias: torch.Tensor | None) -> PackedMatmul | GroupedMatmul:
        product = before(matrix, bias)
        made.append(product)
        return product

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(product_matrix.ProductMatrix, "packed", noting)
        checkpoint_builder(open_checkpoint(directory)).build(context)
    return made


@KERNELS
@pytest.mark.parametrize("name", ["llama", "gemma2", "qwen3-moe"])
def test_every_architecture_goes_to_four_bits(checkpoint: Callable[..., Path], name: str) -> None:
    made = build(checkpoint(name))
    four = sum(isinstance(each, GroupedMatmul) for each in made[len(made) // 2 :])
    assert not any(isinstance(each, GroupedMatmul) for each in made[: len(made) // 2]), "calibrated at eight bits"
    assert four > len(made) // 4
    assert isinstance(made[-1], PackedMatmul) or isinstance(made[0], PackedMatmul), "the head stays at eight bits"


class Half(SingleRank):
    size = 2


@KERNELS
def test_ranks_that_share_a_model_go_to_four_bits_uncalibrated(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("charonia.engine.models.registry.calibrate", None)
    made = build(checkpoint("llama"), shard=Shard(Half()))
    assert sum(isinstance(each, PackedMatmul) for each in made) == 1, "the head"
    assert sum(isinstance(each, GroupedMatmul) for each in made) == len(made) - 1 > 4


@KERNELS
def test_a_second_load_is_not_calibrated(
    checkpoint: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache: PackingCache = open_packing_cache(tmp_path / "packed", 1 << 30)
    first = build(checkpoint("llama"), cache=cache)
    first = first[len(first) // 2 :]
    monkeypatch.setattr("charonia.engine.models.registry.calibrate", None)
    second = build(checkpoint("llama"), cache=cache)
    assert [type(each) for each in first] == [type(each) for each in second]
    for one, other in zip(first, second, strict=True):
        assert isinstance(one, PackedMatmul | GroupedMatmul)
        assert isinstance(other, PackedMatmul | GroupedMatmul)
        x = weights(3, one.form.inputs).bfloat16()
        assert torch.equal(one(x), other(x))


def test_without_kernels_four_bits_are_served_too(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "supports", lambda *_: False)
    made: list[object] = []
    monkeypatch.setattr(product_matrix, "TorchInt4Matmul", lambda *given: made.append(given) or TorchInt4Matmul(*given))
    context = BuildContext(torch.float32, torch.device("cpu"), 64, quantization="int4")
    checkpoint_builder(open_checkpoint(checkpoint("llama"))).build(context)
    assert len(made) > 2


def test_calibration_is_the_same_each_time(checkpoint: Callable[..., Path]) -> None:
    builder = checkpoint_builder(open_checkpoint(checkpoint("llama")))
    context = BuildContext(torch.bfloat16, torch.device("cpu"), 64)
    one, other = (models_calibration.calibrate(builder, context) for _ in range(2))
    assert one.higher == other.higher
    assert all(torch.equal(one.squares[name], other.squares[name]) for name in one.squares)
