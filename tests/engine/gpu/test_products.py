"""Products as layers ask for them on a GPU, interpreted, beside those of the CPU."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from charonia.core.errors import InvalidArgument
from charonia.engine.checkpoint.build_context import BuildContext
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint
from charonia.engine.checkpoint.quantised_weights import open_weights
from charonia.engine.checkpoint.weights import CheckpointWeights, TensorSlice, WeightLoader
from charonia.engine.config import EngineConfig
from charonia.engine.cpu import library
from charonia.engine.layers.product_matrix import build_matmul
from charonia.engine.layers.torch_matmul import Matmul, torch_matmul
from charonia.engine.worker.loaded_rank import load_rank
from tests.quantised_files import STYLES, write_quantised

CPU = torch.device("cpu")
PIECES = [TensorSlice(f"model.layers.0.mlp.{one}_proj.weight", (96, 64), slice(10, 75)) for one in ("gate", "up")]


def product(directory: Path, quantization: str, dtype: torch.dtype = torch.float32) -> Matmul:
    context = BuildContext(dtype, CPU, 64, quantization=quantization)
    return build_matmul(WeightLoader(CheckpointWeights(directory), context), PIECES)


def test_int8_is_that_of_the_cpu(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(library, "supports", lambda *_: False)
    expected = product(checkpoint("llama"), "int8")(x)
    request.getfixturevalue("interpreted")
    assert torch.equal(product(checkpoint("llama"), "int8")(x), expected)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("quantization", "bound"), [("int8", 0.03), ("fp8", 0.06), ("int4", 0.25)])
def test_quantised_products_are_near(
    checkpoint: Callable[..., Path], quantization: str, bound: float, dtype: torch.dtype
) -> None:
    weight = torch.cat([CheckpointWeights(checkpoint("llama")).read(piece) for piece in PIECES]).double()
    x = torch.randn(17, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    found, right = product(checkpoint("llama"), quantization, dtype)(x), x.double() @ weight.t()
    assert found.dtype == dtype
    assert (found - right).abs().max() < bound * right.abs().max()


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(
    ("style", "kind"),
    [
        ("gptq in another order", "TritonGroupedMatmul"),
        ("awq", "TritonGroupedMatmul"),
        ("w4a16 asymmetric", "TritonGroupedMatmul"),
        ("w8a8", "TritonScaledMatmul"),
        ("fp8 blocks", "TritonScaledMatmul"),
        ("w8a8 fp8", "TritonScaledMatmul"),
        ("w8a8 fp8 tensor", "TritonScaledMatmul"),
        ("fp8 channel", "floats"),
    ],
)
def test_the_codes_of_checkpoints_are_multiplied_with(
    checkpoint: Callable[..., Path], tmp_path: Path, style: str, kind: str
) -> None:
    directory, _ = write_quantised(checkpoint("llama"), tmp_path, STYLES[style]())
    source, context = open_weights(open_checkpoint(str(directory))), BuildContext(torch.float16, CPU, 64)
    found = build_matmul(WeightLoader(source, context), PIECES)
    floats = type(torch_matmul(torch.zeros(4, 4, dtype=torch.float16), None)).__name__  # which depends on the processor
    assert type(found).__name__ == {"floats": floats}.get(kind, kind)
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1)).half()
    right = x.double() @ torch.cat([source.read(piece) for piece in PIECES]).double().t()
    bound = 0.05 if "fp8" in style else 0.02 if style == "w8a8" else 0.002
    assert (found(x) - right).abs().max() < bound * right.abs().max()


def test_fp8_is_refused_on_a_cpu(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(InvalidArgument, match=r"fp8 computes on GPUs .* not on cpu") as error:
        load_rank(EngineConfig(model=str(checkpoint("llama")), device="cpu", quantization="fp8"))
    assert error.value.field == "quantization"
