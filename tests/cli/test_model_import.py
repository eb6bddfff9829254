"""`charonia import`: what is written for which files, and that nothing stays of what cannot be served."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper

from charonia.cli.import_plan import locate_source, plan_import
from charonia.cli.model_import import import_model
from charonia.cli.options import ConfigOptions
from charonia.cli.repository_check import print_check_report
from charonia.core.errors import AlreadyExists, CharoniaError, InvalidArgument, NotFound, Unsupported


@pytest.fixture
def onnx_models(sibling: Callable[[str], ModuleType]) -> ModuleType:
    return sibling("onnx_models.py")


@pytest.fixture
def mlp(onnx_models: Any, tmp_path: Path) -> Path:
    file = tmp_path / "sources" / "small net.onnx"
    file.parent.mkdir()
    onnx_models.write_mlp(file, (4, 2))
    return file


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    return tmp_path / "models"


def write_embedder_files(directory: Path) -> Path:
    """The small files of a checkpoint; of weights, nothing is read before it loads."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps({"architectures": ["BertModel"], "hidden_size": 8}))
    return directory


def test_files_are_linked_and_the_config_is_short(
    mlp: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import_model(str(mlp), repository, "", copied=False)
    [model] = repository.iterdir()
    assert model.name == "small-net"
    assert (model / "1" / "model.onnx").readlink() == mlp
    assert (model / "config.pbtxt").read_text().splitlines()[1:] == ['backend: "onnxruntime"']
    said = capsys.readouterr().out
    assert f"{model}: an ONNX model, linked from {mlp}\n  max_batch_size  4\n" in said
    assert "  input           INPUT FP32 [4]\n  output          OUTPUT FP32 [2]\n  check           good: onnx" in said
    assert f"charonia serve --model-repository {repository}\n  curl -s localhost:8000/v2/models/small-net/infer" in said
    assert print_check_report([str(repository)], ConfigOptions()) == 0


def test_copies_outlive_the_source(mlp: Path, repository: Path) -> None:
    import_model(str(mlp), repository, "net", copied=True)
    shutil.rmtree(mlp.parent)
    assert print_check_report([str(repository)], ConfigOptions()) == 0
    assert not (repository / "net" / "1" / "model.onnx").is_symlink()


@pytest.mark.parametrize("copied", [False, True])
def test_weights_beside_an_onnx_model_come_along(tmp_path: Path, repository: Path, copied: bool) -> None:
    file = tmp_path / "net" / "net.onnx"
    file.parent.mkdir()
    weights = onnx.numpy_helper.from_array(np.ones((300, 4), np.float32), "W")
    tensors = [helper.make_tensor_value_info(name, 1, ["n", size]) for name, size in (("X", 300), ("Y", 4))]
    graph = helper.make_graph([helper.make_node("MatMul", ["X", "W"], ["Y"])], "g", tensors[:1], tensors[1:], [weights])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    onnx.save(model, file, save_as_external_data=True, location="net.data", size_threshold=0)
    (file.parent / "notes.txt").write_text("not the model's")
    import_model(str(file.parent), repository, "", copied)
    assert sorted(os.listdir(repository / "net" / "1")) == ["model.onnx", "net.data"]


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("bert base", "bert-base"),
        ("resnet/model", "resnet"),
        ("resnet/1/onnx", "resnet"),
        ("hub/models--owner--some-bert/snapshots/0a1b", "some-bert"),
        (".hidden", "hidden"),
        ("größe", "größe"),
    ],
)
def test_a_name_is_guessed(tmp_path: Path, path: str, name: str) -> None:
    assert plan_import(write_embedder_files(tmp_path / path)).name == name


@pytest.mark.parametrize("name", ["a/b", "..", ".a", "a\0", "x" * 256, "\udc80"])
def test_a_name_that_no_model_can_have_is_refused(mlp: Path, name: str) -> None:
    with pytest.raises(InvalidArgument, match="is no name of a model"):
        plan_import(mlp, name)


def test_a_hub_id_is_found_in_the_cache_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = write_embedder_files(tmp_path / "models--owner--net" / "snapshots" / "0a1b")
    (tmp_path / "models--owner--net" / "refs").mkdir()
    (tmp_path / "models--owner--net" / "refs" / "main").write_text("0a1b")
    assert locate_source("owner/net") == snapshot
    for absent in ("owner/other", "owner/net@v2", "./absent", "absent file"):
        with pytest.raises(NotFound, match=f"'{absent}' is no path, and not in the Hugging Face cache .*hf download"):
            locate_source(absent)


def test_nemo_is_told_how_to_leave(tmp_path: Path) -> None:
    archive = tmp_path / "my llama.nemo"
    archive.touch()
    folder = tmp_path / "nemo2"
    for part in ("context", "weights"):
        (folder / part).mkdir(parents=True)
    for path in (archive, folder):
        with pytest.raises(Unsupported) as refusal:
            plan_import(path)
        first, export, then, _ = refusal.value.message.splitlines()
        assert "is a checkpoint of NeMo" in first
        assert export == f"  nemo llm export path={_quoted(path)} target=hf output_path={_quoted(path.stem + '-hf')}"
        assert then == f"  charonia import {_quoted(path.stem + '-hf')}"


def _quoted(path: object) -> str:
    return f"'{path}'" if " " in str(path) else str(path)


def spoiled(directory: Path, *files: str) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    for file in files:
        (directory / file).write_text("{}")
    return directory


@pytest.mark.parametrize(
    ("files", "says"),
    [
        ((), "is no model that is known here: it has neither config.json nor modules.json"),
        (("a.onnx", "b.onnx"), "has several models: name one, a.onnx, b.onnx"),
        (("config.pbtxt",), "is a model repository, or a model of one, already"),
        (("adapter_config.json",), "this is a PEFT adapter of None and no model"),
        (("config.json",), "no tokenizer.json"),
        (("model.onnx",), "onnxruntime cannot load"),
        (("model.pt",), "is no TorchScript"),
    ],
)
def test_nothing_stays_of_what_cannot_be_served(
    tmp_path: Path, repository: Path, files: tuple[str, ...], says: str
) -> None:
    source = spoiled(tmp_path / "source", *files)
    with pytest.raises(CharoniaError, match=says) as refusal:
        import_model(str(source), repository, "", copied=False)
    assert str(source) in refusal.value.message
    assert ".import-" not in refusal.value.message
    assert not repository.exists() or not list(repository.iterdir())


def test_other_files_are_told_apart(tmp_path: Path) -> None:
    for name in ("model.safetensors", "model.h5", "model.json"):
        file = spoiled(tmp_path, name) / name
        with pytest.raises(
            InvalidArgument, match=r"those end with \.onnx, .*, \.xml or \.gguf, or are a forest's \.json"
        ):
            plan_import(file)


def test_unusual_files(mlp: Path, tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe.pt")
    with pytest.raises(InvalidArgument, match=r"pipe.pt' is neither a file nor a directory"):
        plan_import(tmp_path / "pipe.pt")
    nameless = mlp.rename(Path(os.fsdecode(os.fsencode(mlp.parent) + b"/\xff.onnx")))
    import_model(str(nameless), repository, "", copied=False)
    assert os.listdir(repository) == ["model"]
    assert "\\udcff.onnx" in capsys.readouterr().out


def test_what_is_there_stays_as_it_is(mlp: Path, repository: Path, tmp_path: Path) -> None:
    (repository / "small-net").mkdir(parents=True)
    with pytest.raises(AlreadyExists, match="is there already: choose another --name"):
        import_model(str(mlp), repository, "", copied=False)
    (repository / "dangling").symlink_to(tmp_path / "nowhere")
    with pytest.raises(AlreadyExists, match="dangling"):
        import_model(str(mlp), repository, "dangling", copied=False)
    checkpoint = write_embedder_files(tmp_path / "bert")
    with pytest.raises(InvalidArgument, match="is a checkpoint and no model repository: choose another --into"):
        import_model(str(mlp), checkpoint, "", copied=False)
    assert sorted(path.name for path in repository.iterdir()) == ["dangling", "small-net"]
    for copied in (False, True):
        with pytest.raises(InvalidArgument, match=r"lies within .*bert': choose another --into"):
            import_model(str(checkpoint), checkpoint / "models", "", copied)


def test_a_checkpoint_without_weights_is_told_of_its_onnx_model(tmp_path: Path, repository: Path) -> None:
    source = spoiled(tmp_path / "source", "config.json")
    (source / "onnx").mkdir()
    spoiled(source / "onnx", "model.onnx")
    with pytest.raises(
        CharoniaError, match=r"source' would not load: .*; but there is .*source/onnx/model.onnx, which"
    ):
        import_model(str(source), repository, "", copied=False)


def test_a_place_that_cannot_be_written_is_told(mlp: Path) -> None:
    for place in (mlp, Path("/proc/models")):
        with pytest.raises(InvalidArgument, match=f"cannot import into '{place}': "):
            import_model(str(mlp), place, "", copied=False)


def test_a_copy_that_breaks_off_leaves_nothing(mlp: Path, repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(source: Path, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(InvalidArgument, match=r"cannot import into .*: No space left on device"):
        import_model(str(mlp), repository, "", copied=True)
    assert not list(repository.iterdir())


def write_forest(file: Path) -> Any:
    """LightGBM's estimator, and its file."""
    lightgbm: Any = pytest.importorskip("lightgbm")
    pytest.importorskip("treelite")
    rows = np.random.default_rng(0).normal(size=(64, 3))
    settings = {"objective": "binary", "verbose": -1, "min_data_in_leaf": 1, "num_threads": 1}
    booster = lightgbm.train(settings, lightgbm.Dataset(rows, rows[:, 0] > 0), 3)
    booster.save_model(file)
    return booster


def test_forests_become_models(tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_forest(tmp_path / "risk.txt")
    import_model(str(tmp_path / "risk.txt"), repository, "", copied=False)
    assert (repository / "risk" / "1" / "model.txt").is_symlink()
    assert 'key: "model_type" value { string_value: "lightgbm" }' in (repository / "risk" / "config.pbtxt").read_text()
    assert "a forest of LightGBM, linked from" in capsys.readouterr().out
    assert print_check_report([str(repository)], ConfigOptions()) == 0
    (tmp_path / "notes.txt").write_text("a note")
    with pytest.raises(InvalidArgument, match="is no model that is known here"):
        import_model(str(tmp_path / "notes.txt"), repository, "", copied=False)


def test_a_pickle_runs_only_where_it_is_trusted(
    tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "risk.pkl"
    forests: Any = pytest.importorskip("sklearn.ensemble")
    rows = np.random.default_rng(0).normal(size=(64, 3))
    file.write_bytes(pickle.dumps(forests.RandomForestClassifier(4, random_state=0).fit(rows, rows[:, 0] > 0)))
    with pytest.raises(Unsupported, match="is a pickle, which runs whatever it says: --trust-pickle"):
        import_model(str(file), repository, "", copied=False)
    import_model(str(file), repository, "", copied=False, trust_pickle=True)
    assert f"a forest, unpickled from {file}, copied" in capsys.readouterr().out
    assert (repository / "risk" / "1" / "checkpoint.tl").is_file()
    assert 'key: "output_class" value { string_value: "true" }' in (repository / "risk" / "config.pbtxt").read_text()
    assert print_check_report([str(repository)], ConfigOptions()) == 0
    file.write_bytes(pickle.dumps(write_forest(tmp_path / "risk.txt")))
    import_model(str(file), repository, "boosted", copied=False, trust_pickle=True)
    file.write_bytes(pickle.dumps({"no": "forest"}))
    with pytest.raises(InvalidArgument, match=r"cannot be made a checkpoint: TypeError: builtins\.dict is no"):
        import_model(str(file), repository, "other", copied=False, trust_pickle=True)
    assert not (repository / "other").exists()


CONVERTER = find_spec("tf2onnx") is not None and find_spec("tensorflow") is not None


@pytest.mark.skipif(CONVERTER, reason="what is missing elsewhere is here")
def test_a_saved_model_needs_its_converter(tmp_path: Path, repository: Path) -> None:
    (tmp_path / "resnet.savedmodel").mkdir()
    (tmp_path / "resnet.savedmodel" / "saved_model.pb").write_bytes(b"")
    with pytest.raises(Unsupported, match=r"is a SavedModel of TensorFlow: .* pip install '\.\[tensorflow\]'"):
        import_model(str(tmp_path / "resnet.savedmodel"), repository, "", copied=False)
    assert not repository.exists()


@pytest.mark.skipif(not CONVERTER, reason="TensorFlow and tf2onnx are not installed")
def test_a_saved_model_becomes_onnx(
    root: Path, tmp_path: Path, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = root / "tests" / "classic_backends" / "savedmodels.py"
    subprocess.run([sys.executable, str(script), str(tmp_path)], check=True, capture_output=True)
    source = (tmp_path / "scaler").rename(tmp_path / "scaler.savedmodel")
    import_model(str(source), repository, "", copied=False)
    assert f"an ONNX model, made of the SavedModel {source}, copied" in capsys.readouterr().out
    made = repository / "scaler" / "1" / "model.onnx"
    assert made.is_file()
    assert not made.is_symlink()
    session: Any = pytest.importorskip("onnxruntime").InferenceSession(made)
    [answered] = session.run(["y"], {"x": np.array([[2, 0]], np.float32)})
    assert answered.tolist() == [[2, 4, 6]]
    with pytest.raises(InvalidArgument, match=r"tf2onnx does not know the operators StringJoin; as NAME"):
        import_model(str(tmp_path / "texts"), repository, "", copied=False)
    assert [each.name for each in repository.iterdir()] == ["scaler"]
