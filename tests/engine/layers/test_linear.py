"""Products as layers ask for them: with the kernels, and on the torch path."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from charonia.engine.checkpoint.adapter_files import read_adapter
from charonia.engine.checkpoint.adapter_targets import AdapterTargets
from charonia.engine.checkpoint.build_context import BuildContext
from charonia.engine.checkpoint.weights import CheckpointWeights, TensorSlice, WeightLoader
from charonia.engine.config import LoraConfig
from charonia.engine.cpu import library
from charonia.engine.layers.linear import LayerMatmul
from charonia.engine.layers.product_matrix import LAYER, ROUTER, PackedMatmul, build_matmul
from charonia.engine.layers.step_context import StepContext
from charonia.engine.layers.torch_matmul import TorchInt8Matmul, onednn_packing_works, quantize_rows, torch_matmul
from charonia.engine.step_adapters import StepAdapters
from charonia.engine.step_batch import StepBatch

NAMES = [f"model.layers.0.mlp.{one}_proj.weight" for one in ("gate", "up")]
PIECES = [TensorSlice(name, (96, 64), slice(10, 75), slice(3, 64)) for name in NAMES]


def loader(directory: Path, dtype: torch.dtype, quantized: bool) -> WeightLoader:
    return WeightLoader(
        CheckpointWeights(directory),
        BuildContext(dtype, torch.device("cpu"), 64, quantization="int8" if quantized else "none"),
    )


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernels", [True, False])
def test_pieces_become_one_product(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, quantized: bool, kernels: bool
) -> None:
    if not kernels:
        monkeypatch.setattr(library, "supports", lambda *_: False)
    directory = checkpoint("llama")
    load = loader(directory, dtype, quantized)
    bias = torch.randn(130, generator=torch.Generator().manual_seed(1)).to(dtype)
    product = build_matmul(load, PIECES, bias)
    weight = torch.cat([CheckpointWeights(directory).read(piece) for piece in PIECES]).double()
    for rows in (1, 2, 17, 200):
        x = torch.randn(rows, 61, generator=torch.Generator().manual_seed(rows)).to(dtype)
        right = x.double() @ weight.T + bias.double()
        found = product(x)
        assert found.dtype == dtype
        bound = 0.03 if quantized else 4 * torch.finfo(dtype).eps
        assert (found.double() - right).abs().max() < bound * right.abs().max()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_kernel_and_reference_quantise_alike(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    load = loader(checkpoint("llama"), dtype, True)
    ours = build_matmul(load, PIECES)
    monkeypatch.setattr(library, "supports", lambda *_: False)
    theirs = build_matmul(load, PIECES)
    assert isinstance(theirs, TorchInt8Matmul)
    x = torch.randn(50, 61, generator=torch.Generator().manual_seed(0)).to(dtype)
    # A number half way between two may go to the one here and to the other there.
    step = float(x.abs().max()) * float(CheckpointWeights(checkpoint("llama")).read(PIECES[0]).abs().max()) / 127
    assert torch.allclose(ours(x).float(), theirs(x).float(), rtol=2 * torch.finfo(dtype).eps, atol=2 * step)


def test_a_router_is_not_quantised(checkpoint: Callable[..., Path]) -> None:
    load = loader(checkpoint("llama"), torch.bfloat16, True)
    if not library.supports(load.dtype, load.device):
        pytest.skip("no C extension here")
    router, layer = build_matmul(load, PIECES, use=ROUTER), build_matmul(load, PIECES, use=LAYER)
    assert isinstance(router, PackedMatmul)
    assert isinstance(layer, PackedMatmul)
    assert (router.form.kept, router.form.out) == (torch.bfloat16, torch.float32)
    assert (layer.form.kept, layer.form.out) == (torch.int8, torch.bfloat16)


def test_each_row_has_its_own_scale() -> None:
    x = torch.tensor([[1.0, -2.0], [0.5, 0.25], [0.0, 0.0]])
    numbers, scales = quantize_rows(x)
    assert numbers.tolist() == [[64, -127], [127, 64], [0, 0]]
    assert torch.allclose(scales, torch.tensor([2.0, 0.5, 0.0]) / 127)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_packed_product_is_the_plain_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(200, 64).to(dtype), torch.randn(200).to(dtype)
    product = torch_matmul(weight, bias)
    for rows in (1, 2, 17, 300):
        x = torch.randn(rows, 64).to(dtype)
        right = x.double() @ weight.double().T + bias.double()
        assert (product(x).double() - right).abs().max() < 256 * torch.finfo(dtype).eps


def test_without_onednn_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "charonia.engine.layers.torch_matmul._onednn_matmul", lambda *_: lambda x: torch.zeros(len(x), 80)
    )
    onednn_packing_works.cache_clear()
    assert not onednn_packing_works(torch.float32)
    monkeypatch.undo()
    onednn_packing_works.cache_clear()


@pytest.mark.parametrize("device", ["cpu", "gpu"])
def test_parts_of_one_matrix_that_are_scaled_apart_all_take_an_adapter(
    device: str,
    checkpoint: Callable[..., Path],
    sibling: Callable[[str], ModuleType],
    request: pytest.FixtureRequest,
    tmp_path: Path,
) -> None:
    """Of the highest rank that there may be, whose results fill the memory between its two products; and parts that
    another lies between."""
    if device == "gpu":
        request.getfixturevalue("interpreted")
    cpu, rank, rows, path = torch.device("cpu"), 16, 5, "model.layers.0.mlp.gate_proj"
    cuts = [(0, 30, 0.7), (30, 32, 1.3), (32, 49, 0.7), (60, 96, 1.0)]
    pieces = [TensorSlice(f"{path}.weight", (96, 64), slice(a, b), factor=factor) for a, b, factor in cuts]
    pieces.insert(3, TensorSlice(NAMES[1], (96, 64), slice(0, 20)))
    whole = CheckpointWeights(checkpoint("llama"))
    load = WeightLoader(whole, BuildContext(torch.float32, cpu, 64, max_lora_rank=rank))
    product = LayerMatmul(load, pieces, None)
    written = sibling("adapters.py").write_adapter(tmp_path, {path: (96, 64)}, r=rank, lora_alpha=rank)
    files = read_adapter(str(written), LoraConfig(max_rank=rank))
    assert load.adaptable is not None
    adapter = AdapterTargets(load.adaptable, torch.float32, cpu, range(2), 2).prepare(files)
    step = StepAdapters([adapter], np.array([0, rows]), np.arange(rows))
    nothing: Any = None
    batch = StepBatch([0], [0], [rows], torch.zeros(1, rows), torch.zeros(1, 1), 16)
    x = torch.randn(rows, 64, generator=torch.Generator().manual_seed(1))
    a, b = (
        load_file(written / "adapter_model.safetensors")[f"base_model.model.{path}.lora_{side}.weight"] for side in "AB"
    )
    merged = whole.read(TensorSlice(f"{path}.weight", (96, 64))).double() + b.double() @ a.double()
    parts = [factor * merged[first:end] for first, end, factor in cuts]
    parts.insert(3, whole.read(pieces[3]).double())
    found = product(x, StepContext(batch, nothing, step))
    torch.testing.assert_close(found.double(), x.double() @ torch.cat(parts).T, rtol=1e-4, atol=1e-4)
