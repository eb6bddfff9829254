"""Every call of torch.cuda that shipped code makes: known to the stand-in, and made with a device's index."""

import ast
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from charonia.engine.attention.host_cache import HostCache
from charonia.engine.config import EngineConfig
from charonia.engine.gpu import runtime
from charonia.engine.worker.devices import resolve_device
from charonia.engine.worker.rank_memory import free_memory, peak_bytes
from tests.cuda_stand_in import DEVICE_CALLS, StandInCuda

ROOT = Path(__file__).parents[3]
FOLDERS = ("analyzer", "api", "bench", "classic_backends", "cli", "engine", "http_workers", "planning", "processes")


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StandInCuda:
    stand_in = StandInCuda()
    stand_in.put_in_place(monkeypatch)
    return stand_in


def called(source: str) -> Iterator[str]:
    """The names of torch.cuda in a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.cuda":
            yield node.attr


def test_the_stand_in_knows_every_call() -> None:
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]
    used = {name for file in files if "torch.cuda" in (source := file.read_text()) for name in called(source)}
    known = StandInCuda().functions().keys()
    assert used == known


def test_a_gpu_has_its_index(cuda: StandInCuda) -> None:
    devices = [resolve_device(name) for name in ("auto", "cuda", "cuda:0", "cuda:1", "cpu")]
    assert [str(device) for device in devices] == ["cuda:0", "cuda:0", "cuda:0", "cuda:1", "cpu"]


CALLS: dict[str, Callable[[torch.device], object]] = {
    "capability": lambda device: runtime.capability.__wrapped__(device),
    "name": runtime.describe_gpu,
    "free memory": lambda device: free_memory(device, 1, EngineConfig(model="", gpu_memory=1000)),
    "peak of a step": lambda device: peak_bytes(device, lambda: None),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_what_is_asked_about_a_gpu_names_it(call: Callable[[torch.device], object], cuda: StandInCuda) -> None:
    call(resolve_device("cuda:1"))
    assert cuda.calls
    assert {name for name, _ in cuda.calls} <= {*DEVICE_CALLS}
    assert {index for _, index in cuda.calls} == {1}
    with pytest.raises(ValueError, match="with a specified index"):
        call(torch.device("cuda"))


def test_a_gpu_is_described_for_people(cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    described = runtime.describe_gpu(resolve_device("cuda:1"))
    assert described == "a stand-in, compute capability 9.0, 8e-06 GB; Triton's kernels"
    monkeypatch.setenv("CHARONIA_KERNELS", "none")
    assert runtime.describe_gpu(resolve_device("cuda:1")).endswith("torch's kernels alone")
    assert runtime.gpu_names() == ["a stand-in"] * 2


def test_blocks_on_the_host_have_a_stream_of_their_gpu(cuda: StandInCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        """A tensor of blocks, as far as a cache of copies asks."""

        device, dtype, shape = torch.device("cuda", 1), torch.float32, (3, 2)

        def __getitem__(self, block: int) -> torch.Tensor:
            return torch.zeros(2)

    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *size, pin_memory, **more: empty(*size, **more))
    cache: Any = HostCache([OnGpu()], 2)  # type: ignore[list-item]
    assert cache._stream.device_index == 1
    cache.make_copies(np.zeros((0, 3), np.int32))
