"""SavedModels, in the processes that run them. TensorFlow, 1.6 GB, is no development tool: where it is installed."""

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from charonia.classic_backends.isolated.isolated_runtime import TENSORFLOW
from charonia.classic_backends.tensorflow_backend import show_gpu
from charonia.core.errors import CharoniaError, InvalidArgument, NotFound, Unsupported
from charonia.core.model import ModelConfig
from charonia.core.runtime import InstancePlacement, Runtime

Describe = Callable[[Mapping[str, Any]], ModelConfig]
Open = Callable[..., tuple[dict[str, Any], Runtime]]

installed = pytest.mark.skipif(find_spec("tensorflow") is None, reason="TensorFlow is not installed")
BARE = {"name": "model", "max_batch_size": 0}


@pytest.fixture(scope="module")
def saved(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with SavedModels."""
    directory = tmp_path_factory.mktemp("saved")
    script = root / "tests" / "classic_backends" / "savedmodels.py"
    subprocess.run([sys.executable, str(script), str(directory)], check=True, capture_output=True)
    return directory


def place(saved: Path, name: str, version: Path) -> None:
    shutil.copytree(saved / name, version / "model.savedmodel")


@pytest.fixture
def opened(version: Path, described: Describe) -> Iterator[Open]:
    """Completes and loads what lies in the version; it is closed in the end."""
    runtimes = []

    def open_it(raw: Mapping[str, Any] = BARE, **parameters: str) -> tuple[dict[str, Any], Runtime]:
        completed = dict(TENSORFLOW.complete(version, raw, parameters))
        config = described({**completed, "backend": "tensorflow"})
        runtimes.append(TENSORFLOW.load(version, config, InstancePlacement(), parameters))
        return completed, runtimes[-1]

    yield open_it
    for runtime in runtimes:
        runtime.close()


@pytest.mark.skipif(find_spec("tensorflow") is not None, reason="TensorFlow is installed")
def test_without_the_package_it_says_what_to_install(version: Path) -> None:
    (version / "model.savedmodel").mkdir()
    (version / "model.savedmodel" / "saved_model.pb").write_bytes(b"")
    with pytest.raises(Unsupported, match=r"need the package tensorflow, .* pip install '\.\[tensorflow\]'"):
        TENSORFLOW.complete(version, BARE, {})


def test_no_thread_of_the_server_runs_one(version: Path) -> None:
    with pytest.raises(InvalidArgument, match="parameter 'EXECUTION' must be one of 'isolated', got 'thread'"):
        TENSORFLOW.complete(version, BARE, {"EXECUTION": "thread"})


def test_what_is_not_there_is_named(version: Path) -> None:
    with pytest.raises(NotFound, match=r"unable to find '.*model\.savedmodel/saved_model\.pb' for model 'model'"):
        TENSORFLOW.complete(version, BARE, {})
    with pytest.raises(Unsupported, match="is a graph without signatures"):
        TENSORFLOW.complete(version, BARE | {"default_model_filename": "model.graphdef"}, {})


@installed
def test_a_signature_completes_the_config_and_is_run(version: Path, saved: Path, opened: Open) -> None:
    place(saved, "scaler", version)
    raw, runtime = opened()
    assert raw["max_batch_size"] == 4
    assert raw["input"] == [{"name": "x", "data_type": "TYPE_FP32", "dims": [2]}]
    assert raw["output"] == [{"name": "y", "data_type": "TYPE_FP32", "dims": [3]}]
    rows = np.array([[1, 1], [2, 0]], np.float32)
    for _ in range(2):
        [made] = runtime.execute({"x": rows}, ["y"])
        np.testing.assert_array_equal(made["y"], [[5, 7, 9], [2, 4, 6]])


@installed
def test_strings_and_bfloat16_cross_as_they_are(version: Path, saved: Path, opened: Open) -> None:
    """Also the only signature that there is, where none has the usual name."""
    place(saved, "texts", version)
    raw, runtime = opened()
    assert [(each["name"], each["data_type"]) for each in raw["input"]] == [("h", "TYPE_BF16"), ("s", "TYPE_STRING")]
    texts, halves = np.array([[b"\xff\0"], [b""]], object), np.array([[0x3F80, 0x4000]] * 2, np.uint16)
    [made] = runtime.execute({"s": texts, "h": halves}, ["joined", "doubled"])
    assert made["joined"].tolist() == [[b"\xff\0\xff\0"], [b""]]
    assert made["doubled"].tolist() == [[0x4000, 0x4080]] * 2


@installed
def test_another_signature_is_chosen_and_its_errors_are_told(version: Path, saved: Path, opened: Open) -> None:
    place(saved, "scaler", version)
    _, runtime = opened(TF_SIGNATURE_DEF="checked", TF_NUM_INTRA_THREADS="1")
    rows = np.full((1, 2), 11, np.float32)
    with pytest.raises(CharoniaError, match=r"TensorFlow error: .*too large"):
        list(runtime.execute({"x": rows}, ["y"]))
    [made] = runtime.execute({"x": rows - 10}, ["y"])
    assert made["y"].tolist() == [[1, 1]]


@installed
def test_wrong_ones_are_refused_by_name(version: Path, saved: Path, opened: Open, described: Describe) -> None:
    place(saved, "scaler", version)
    for name, value, known in (
        ("TF_SIGNATURE_DEF", "other", "checked, serving_default, texts"),
        ("TF_GRAPH_TAG", "train", "serve"),
    ):
        with pytest.raises(InvalidArgument, match=f"parameter '{name}': the model has no '{value}', but {known}"):
            opened(**{name: value})
    raw, _ = opened()
    raw["output"] = [{"name": "z", "data_type": "TYPE_FP32", "dims": [3]}]
    with pytest.raises(InvalidArgument, match="unexpected inference output 'z', allowed outputs are: y"):
        opened(raw)
    on_a_gpu = InstancePlacement("KIND_GPU", 7)
    with pytest.raises(Unsupported, match="KIND_CPU"), closing(TENSORFLOW.load(version, described(raw), on_a_gpu, {})):
        pass
    (version / "model.savedmodel" / "saved_model.pb").write_bytes(b"nonsense")
    with pytest.raises(InvalidArgument, match=r"TensorFlow cannot load .*model\.savedmodel"):
        opened()


def test_an_instance_sees_its_own_gpu_alone() -> None:
    said: list[Any] = []
    configured = SimpleNamespace(
        list_physical_devices=lambda kind: [f"{kind}:0", f"{kind}:1"],
        experimental=SimpleNamespace(set_memory_growth=lambda *given: said.append(given)),
        set_visible_devices=lambda *given: said.append(given),
    )
    show_gpu(SimpleNamespace(config=configured), 1)
    assert said == [("GPU:1", True), (["GPU:1"], "GPU")]
    with pytest.raises(Unsupported, match="TensorFlow finds 2 GPUs here, and none with the number 2") as refused:
        show_gpu(SimpleNamespace(config=configured), 2)
    assert (refused.value.field, len(said)) == ("instance_group.kind", 2)
