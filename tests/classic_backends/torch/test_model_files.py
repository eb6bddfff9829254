"""The tensors of TorchScript models, found out by running them."""

import warnings
from pathlib import Path

import pytest
import torch

from charonia.classic_backends.backend_config import FoundTensor
from charonia.classic_backends.torch.model_files import guess_config, guess_tensors
from charonia.core.errors import InvalidArgument


class Linear(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x) * scale, x.argmax(-1)


class Words(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(50, 8)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"vectors": self.embedding(ids) * mask.unsqueeze(-1)}


class Image(torch.nn.Module):
    """Of 28 x 28 pixels alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = torch.nn.Conv2d(1, 2, 3, stride=2)
        self.linear = torch.nn.Linear(2 * 13 * 13, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(self.conv(x).flatten(1))


class Doubled(torch.nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


class Scaled(torch.nn.Module):
    def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return factor * x


def script(module: torch.nn.Module, directory: Path) -> Path:
    file = directory / "model.pt"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        torch.jit.script(module.eval()).save(str(file))
    return file


@pytest.mark.parametrize(
    ("module", "inputs", "outputs"),
    [
        (Linear(), [("FP32", (-1, 16))], [("OUTPUT__0", "FP32", (-1, 4)), ("OUTPUT__1", "INT64", (-1,))]),
        (Linear().double(), [("FP64", (-1, 16))], [("OUTPUT__0", "FP64", (-1, 4)), ("OUTPUT__1", "INT64", (-1,))]),
        (Words(), [("INT64", (-1, -1))] * 2, [("vectors", "FP32", (-1, -1, 8))]),
        (Image(), [("FP32", (-1, 1, 28, 28))], [("OUTPUT__0", "FP32", (-1, 10))]),
        (Doubled(), [("FP32", (-1, -1))], [("OUTPUT__0", "FP32", (-1, -1))]),
    ],
)
def test_a_model_that_runs_tells_its_tensors(
    tmp_path: Path,
    module: torch.nn.Module,
    inputs: list[tuple[str, tuple[int, ...]]],
    outputs: list[tuple[str, str, tuple[int, ...]]],
) -> None:
    found = guess_tensors(script(module, tmp_path))
    assert found.inputs == tuple(FoundTensor(f"INPUT__{index}", *each) for index, each in enumerate(inputs))
    assert found.outputs == tuple(FoundTensor(*output) for output in outputs)


def test_the_config_is_batched(tmp_path: Path) -> None:
    assert guess_config({"backend": "pytorch"}, script(Words(), tmp_path)) == {
        "backend": "pytorch",
        "max_batch_size": 4,
        "input": [{"name": f"INPUT__{index}", "data_type": "TYPE_INT64", "dims": [-1]} for index in range(2)],
        "output": [{"name": "vectors", "data_type": "TYPE_FP32", "dims": [-1, 8]}],
    }


def test_what_cannot_be_found_out_is_told(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"forward\(x: Tensor, factor: float\) runs on none that were tried"):
        guess_tensors(script(Scaled(), tmp_path))
    weights = tmp_path / "weights.pt"
    torch.save(Linear().state_dict(), weights)
    with pytest.raises(InvalidArgument, match=r"weights.pt holds weights and no model: save that by torch.jit.script"):
        guess_tensors(weights)
    weights.write_bytes(b"nothing")
    with pytest.raises(InvalidArgument, match=r"weights.pt is no TorchScript"):
        guess_tensors(weights)
