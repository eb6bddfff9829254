"""What models need of each memory, by the files that they load and the processes that they start."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from charonia.classic_backends import backend_config
from charonia.classic_backends.builtin import IDENTITY, SQUARE
from charonia.classic_backends.isolated.isolated_runtime import ENCODER, FIL, ONNX, PYTORCH
from charonia.processes.host import Cores

TWO = {"instance_group": [{"count": 2}]}
ON_GPU = {"instance_group": [{"kind": "KIND_GPU", "gpus": [0, 1], "count": 2}]}
MIXED = {"instance_group": [{"kind": "KIND_GPU", "gpus": [1]}, {"kind": "KIND_CPU", "count": 2}]}
TREES = {**MIXED, "default_model_filename": "model.onnx"}
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
    ("loader", "raw", "parameters", "needs"),
    [
        (ONNX, TWO, {}, {None: 7}),
        (ONNX, {"default_model_filename": "apart.onnx"}, {}, {None: 33}),
        (ONNX, {"default_model_filename": "absent.onnx"}, {}, {}),
        (ONNX, TWO, ISOLATED, {None: 14 + 2 * ONNX.library_bytes}),
        (ONNX, ON_GPU, {}, {0: 7, 1: 7}),
        (ONNX, MIXED, {}, {None: 7, 1: 7}),
        (ONNX, MIXED, ISOLATED, {None: 14 + 3 * ONNX.library_bytes, 1: 7}),
        (PYTORCH, {}, THREAD, {None: 100}),
        (PYTORCH, TWO, THREAD, {None: 200}),
        (PYTORCH, TWO, {}, {None: 200 + 2 * PYTORCH.library_bytes}),
        (PYTORCH, ON_GPU, {}, {None: 4 * PYTORCH.library_bytes, 0: 200, 1: 200}),
        (PYTORCH, MIXED, THREAD, {None: 200, 1: 100}),
        (ENCODER, {}, THREAD, {None: 140}),
        (ENCODER, ON_GPU, THREAD, {0: 280, 1: 280}),
        (FIL, TREES, THREAD, {None: 21}),
        (FIL, TREES, {}, {None: 21 + 3 * FIL.library_bytes}),
        (IDENTITY, {}, {}, {}),
        (SQUARE, {}, {}, {}),
    ],
)
def test_a_model_needs_what_it_loads_where_it_goes(
    directory: Path,
    loader: Any,
    raw: Mapping[str, Any],
    parameters: Mapping[str, str],
    needs: Mapping[int | None, int],
) -> None:
    sums: Counter[int | None] = Counter()
    for share in loader.needs(directory, raw, parameters):
        sums[share.gpu] += share.size
    assert +sums == needs


@pytest.mark.parametrize(
    ("raw", "threads"), [({}, 8), (TWO, 4), ({"instance_group": [{"count": 20}]}, 1), (ON_GPU, 8), (MIXED, 4)]
)
def test_instances_share_the_cores(monkeypatch: pytest.MonkeyPatch, raw: Mapping[str, Any], threads: int) -> None:
    monkeypatch.setattr(backend_config, "usable_cores", lambda: Cores(16, 8, 1, 9.5))
    assert backend_config.threads_per_instance(raw) == threads
