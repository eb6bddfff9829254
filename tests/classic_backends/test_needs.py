"""What models need of the host's memory, by the files that they load and the processes that they start."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from charonia.classic_backends import places
from charonia.classic_backends.builtin import IDENTITY, SQUARE
from charonia.classic_backends.isolated import ENCODER, ONNX, PYTORCH
from charonia.core.host import Cores

TWO = {"instance_group": [{"count": 2}]}
ON_GPU = {"instance_group": [{"kind": "KIND_GPU", "gpus": [0, 1], "count": 2}]}
THREAD, ISOLATED = {"EXECUTION": "thread"}, {"EXECUTION": "isolated"}


def sized(file: Path, size: int) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(bytes(size))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    sized(tmp_path / "model.onnx", 7)
    sized(tmp_path / "apart.onnx" / "apart.onnx", 3)
    sized(tmp_path / "apart.onnx" / "weights.bin", 30)
    sized(tmp_path / "model.pt", 100)
    return tmp_path


@pytest.mark.parametrize(
    ("loader", "document", "parameters", "needs"),
    [
        (ONNX, TWO, {}, 7),
        (ONNX, {"default_model_filename": "apart.onnx"}, {}, 33),
        (ONNX, {"default_model_filename": "absent.onnx"}, {}, 0),
        (ONNX, TWO, ISOLATED, 14 + 2 * ONNX.libraries),
        (PYTORCH, {}, THREAD, 100),
        (PYTORCH, TWO, THREAD, 200),
        (PYTORCH, TWO, {}, 200 + 2 * PYTORCH.libraries),
        (PYTORCH, ON_GPU, {}, 4 * PYTORCH.libraries),
        (ENCODER, {}, THREAD, 140),
        (IDENTITY, {}, {}, 0),
        (SQUARE, {}, {}, 0),
    ],
)
def test_a_model_needs_what_it_loads(
    directory: Path, loader: Any, document: Mapping[str, Any], parameters: Mapping[str, str], needs: int
) -> None:
    assert loader.needs(directory, document, parameters) == needs


@pytest.mark.parametrize(
    ("document", "threads"), [({}, 8), (TWO, 4), ({"instance_group": [{"count": 20}]}, 1), (ON_GPU, 8)]
)
def test_instances_share_the_cores(monkeypatch: pytest.MonkeyPatch, document: Mapping[str, Any], threads: int) -> None:
    monkeypatch.setattr(places, "cores", lambda: Cores(16, 8, 1, 9.5))
    assert places.threads_each(document) == threads
