"""Products as layers ask for them: with the kernels, and on the torch path."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from charonia.engine.checkpoint.build_context import Place
from charonia.engine.checkpoint.weights import Loader, Piece, Weights
from charonia.engine.cpu import library
from charonia.engine.layers.matmul import (
    LAYER,
    ROUTER,
    Packed,
    QuantizedProduct,
    packing_works,
    plain,
    prepare,
    quantize,
)

NAMES = [f"model.layers.0.mlp.{one}_proj.weight" for one in ("gate", "up")]
PIECES = [Piece(name, (96, 64), slice(10, 75), slice(3, 64)) for name in NAMES]


def loader(directory: Path, dtype: torch.dtype, quantized: bool) -> Loader:
    return Loader(Weights(directory), Place(dtype, torch.device("cpu"), 64, quantized=quantized))


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kernels", [True, False])
def test_pieces_become_one_product(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, quantized: bool, kernels: bool
) -> None:
    if not kernels:
        monkeypatch.setattr(library, "serves", lambda *_: False)
    directory = checkpoint("llama")
    load = loader(directory, dtype, quantized)
    bias = torch.randn(130, generator=torch.Generator().manual_seed(1)).to(dtype)
    product = prepare(load, PIECES, bias)
    weight = torch.cat([Weights(directory).read(piece) for piece in PIECES]).double()
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
    ours = prepare(load, PIECES)
    monkeypatch.setattr(library, "serves", lambda *_: False)
    theirs = prepare(load, PIECES)
    assert isinstance(theirs, QuantizedProduct)
    x = torch.randn(50, 61, generator=torch.Generator().manual_seed(0)).to(dtype)
    # A number half way between two may go to the one here and to the other there.
    step = float(x.abs().max()) * float(Weights(checkpoint("llama")).read(PIECES[0]).abs().max()) / 127
    assert torch.allclose(ours(x).float(), theirs(x).float(), rtol=2 * torch.finfo(dtype).eps, atol=2 * step)


def test_a_router_is_not_quantised(checkpoint: Callable[..., Path]) -> None:
    load = loader(checkpoint("llama"), torch.bfloat16, True)
    if not library.serves(load.dtype, load.device):
        pytest.skip("no C extension here")
    router, layer = prepare(load, PIECES, use=ROUTER), prepare(load, PIECES, use=LAYER)
    assert isinstance(router, Packed)
    assert isinstance(layer, Packed)
    assert (router.form.kept, router.form.out) == (torch.bfloat16, torch.float32)
    assert (layer.form.kept, layer.form.out) == (torch.int8, torch.bfloat16)


def test_each_row_has_its_own_scale() -> None:
    x = torch.tensor([[1.0, -2.0], [0.5, 0.25], [0.0, 0.0]])
    numbers, scales = quantize(x)
    assert numbers.tolist() == [[64, -127], [127, 64], [0, 0]]
    assert torch.allclose(scales, torch.tensor([2.0, 0.5, 0.0]) / 127)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_packed_product_is_the_plain_one(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weight, bias = torch.randn(200, 64).to(dtype), torch.randn(200).to(dtype)
    product = plain(weight, bias)
    for rows in (1, 2, 17, 300):
        x = torch.randn(rows, 64).to(dtype)
        right = x.double() @ weight.double().T + bias.double()
        assert (product(x).double() - right).abs().max() < 256 * torch.finfo(dtype).eps


def test_without_onednn_nothing_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia.engine.layers.matmul._packed", lambda *_: lambda x: torch.zeros(len(x), 80))
    packing_works.cache_clear()
    assert not packing_works(torch.float32)
    monkeypatch.undo()
    packing_works.cache_clear()
