"""Memory of the host that a GPU reads, pinned by a stand-in for CUDA."""

import gc
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from charonia.core.errors import Unavailable
from charonia.engine.checkpoint.build_context import BuildContext
from charonia.engine.checkpoint.weights import CheckpointWeights, TensorSlice, WeightLoader
from charonia.engine.gpu.pinned_memory import pinned_empty
from tests.cuda_stand_in import StandInCuda


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StandInCuda:
    stand_in = StandInCuda()
    stand_in.put_in_place(monkeypatch)
    return stand_in


def test_memory_is_pinned_as_long_as_a_view_of_it_lives(cuda: StandInCuda) -> None:
    whole = pinned_empty((5, 1000), torch.bfloat16)
    assert (whole.shape, whole.dtype, whole.is_contiguous()) == ((5, 1000), torch.bfloat16, True)
    assert cuda.pinned == {whole.data_ptr(): 10_000}, "not 16,384"
    row = whole[3].fill_(2.5)
    del whole
    assert cuda.pinned
    assert row.sum() == 2500
    gc.disable()
    try:
        del row
        assert not cuda.pinned
    finally:
        gc.enable()


def test_memory_that_cannot_be_pinned_is_named(cuda: StandInCuda) -> None:
    cuda.pins_nothing = True
    with pytest.raises(Unavailable, match=r"^10000 bytes of the host's memory cannot be pinned for the GPU: out"):
        pinned_empty((5, 1000), torch.bfloat16)
    assert not cuda.pinned


def test_a_table_on_the_host_takes_its_own_size(
    checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, name = checkpoint("llama"), "model.embed_tokens.weight"
    cuda = StandInCuda()
    cuda.put_in_place(monkeypatch)
    load = WeightLoader(CheckpointWeights(directory), BuildContext(torch.bfloat16, torch.device("cuda:1"), 64))
    table = load.table(TensorSlice(name, (384, 64), slice(0, 300)), on_host=True)
    assert cuda.pinned == {table.rows.data_ptr(): 300 * 64 * 2}
    stored = load_file(next(directory.glob("*.safetensors")))[name]
    assert torch.equal(table.rows, stored[:300].bfloat16())
    del table
    assert not cuda.pinned
