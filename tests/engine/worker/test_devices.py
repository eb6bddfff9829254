"""The device that each rank of a machine gets."""

import pytest
import torch

from charonia.core.errors import InvalidArgument
from charonia.engine.config import EngineConfig
from charonia.engine.worker.devices import assign_device


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine with four."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)


def config(device: str = "auto", replicas: int = 1, replica: int = 0) -> EngineConfig:
    return EngineConfig(model="", device=device, data_parallel_size=replicas, replica=replica)


def test_one_engine_takes_what_is_named(gpus: None) -> None:
    named = ["auto", "cuda", "cuda:3", "cpu", "cuda:9", "toaster"]
    assert [assign_device(config(name)) for name in named] == ["cuda", "cuda", "cuda:3", "cpu", "cuda:9", "toaster"]


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_nobody_shares_a_gpu(gpus: None, device: str) -> None:
    assert [assign_device(config(device, 4, replica)) for replica in range(4)] == [f"cuda:{n}" for n in range(4)]
    ranks = [assign_device(config(device, 2, replica), local, 2) for replica in range(2) for local in range(2)]
    assert ranks == [f"cuda:{n}" for n in range(4)]
    assert [assign_device(config(device), local, 3) for local in range(3)] == [f"cuda:{n}" for n in range(3)]


@pytest.mark.parametrize(
    ("device", "replicas", "here", "says", "field"),
    [
        ("auto", 5, 1, "data_parallel_size: 5 replicas need a GPU each, and this machine has 4", "data_parallel_size"),
        ("cuda", 2, 3, "2 replicas of 3 ranks need a GPU each", "data_parallel_size"),
        ("cuda", 1, 5, "tensor_parallel_size: 5 ranks need a GPU each", "tensor_parallel_size"),
        ("cuda:1", 2, 1, "device 'cuda:1' is one GPU, and there are 2 replicas", "device"),
        ("cuda:1", 1, 2, "device 'cuda:1' is one GPU, and there are 2 ranks", "device"),
    ],
)
def test_what_is_missing_is_said(gpus: None, device: str, replicas: int, here: int, says: str, field: str) -> None:
    with pytest.raises(InvalidArgument, match=says) as refusal:
        assign_device(config(device, replicas), 0, here)
    assert refusal.value.field == field


def test_all_share_a_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert {assign_device(config(replicas=2, replica=replica), local, 2) for replica in (0, 1) for local in (0, 1)} == {
        "cpu"
    }
    assert assign_device(config("cuda", 2)) == "cuda"  # which is refused by whoever makes tensors on it
