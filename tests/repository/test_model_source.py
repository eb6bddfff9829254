"""Directories and configs become sources; what is wrong is said with file, line and field."""

import json
import os
from pathlib import Path

import pytest

from charonia.core.errors import AlreadyExists, InvalidArgument, NotFound
from charonia.repository.catalog import RepositoryCatalog
from charonia.repository.model_source import checkpoint_source, config_position, is_repository, read_model


def make(root: Path, name: str, config: str | None, *versions: str, checkpoint: bool = True) -> Path:
    for version in versions:
        (root / name / version).mkdir(parents=True)
        if checkpoint:
            (root / name / version / "config.json").write_text("{}")
    (root / name).mkdir(exist_ok=True)
    if config is not None:
        (root / name / "config.pbtxt").write_text(config)
    return root / name


def test_a_whole_config(tmp_path: Path) -> None:
    config = """
    name: "m"  # as its directory
    backend: 'charonia'
    parameters { key: "ahead" value { string_value: "1" } }
    parameters [ { key: "dtype", value: { string_value: "float32" } } ]
    """
    source = read_model(make(tmp_path, "m", config, "1", "2", "10", "03", "warmup"))
    assert (source.name, source.backend) == ("m", "charonia")
    assert [(version.number, version.path) for version in source.versions] == [("10", str(tmp_path / "m" / "10"))]
    assert source.parameters == {"ahead": "1", "dtype": "float32"}
    assert config_position(source.config_file, "dtype") == f"{tmp_path}/m/config.pbtxt:5: "


@pytest.mark.parametrize("config", [None, "", 'name: "m"'])
def test_a_checkpoint_completes_what_is_missing(tmp_path: Path, config: str | None) -> None:
    assert read_model(make(tmp_path, "m", config, "1")).backend == "charonia"


@pytest.mark.parametrize(
    ("architectures", "backend"),
    [
        (["BertModel"], "encoder"),
        (["DebertaV2ForSequenceClassification"], "encoder"),
        (["HF_ColBERT"], "encoder"),
        (["GPT2LMHeadModel"], "charonia"),
        (["MarianMTModel"], "charonia"),
        (["MarianModel"], "encoder"),
        (["LlamaForCausalLM"], "charonia"),
        ([], "charonia"),
        (7, "charonia"),
    ],
)
def test_a_checkpoints_class_tells_what_serves_it(tmp_path: Path, architectures: object, backend: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": architectures}))
    assert checkpoint_source(str(tmp_path)).backend == backend


@pytest.mark.parametrize(
    ("policy", "served"),
    [
        ("", ["10"]),
        ("version_policy { latest {} }", ["10"]),
        ("version_policy { latest { num_versions: 2 } }", ["2", "10"]),
        ("version_policy { latest { num_versions: 9 } }", ["1", "2", "10"]),
        ("version_policy { all {} }", ["1", "2", "10"]),
        ("version_policy { specific { versions: [10, 1, 5] } }", ["1", "10"]),
    ],
)
def test_which_versions_are_served(tmp_path: Path, policy: str, served: list[str]) -> None:
    source = read_model(make(tmp_path, "m", policy, "1", "2", "10"))
    assert [version.number for version in source.versions] == served


@pytest.mark.parametrize(
    ("config", "versions", "says"),
    [
        ('name: "m"\nbogus: 1', ["1"], 'config.pbtxt:2:1 : Message type "inference.ModelConfig" has no field named'),
        ('name: "m\n', ["1"], "config.pbtxt:1:7 : "),
        ("max_batch_size: true", ["1"], "config.pbtxt:1:17 : "),
        ('\nname: "other"', ["1"], "config.pbtxt:2: unexpected directory name 'm' for model 'other', directory"),
        (None, [], "at least one version must be available under the version policy of model 'm'"),
        (None, ["one"], "at least one version must be available under the version policy of model 'm'"),
        (
            "version_policy { specific { versions: [4] } }",
            ["1"],
            "config.pbtxt:1: at least one version must be available under the version policy of model 'm'",
        ),
        (
            'platform: "onnxruntime_onnx" backend: "pytorch"',
            ["1"],
            "unexpected 'platform' and 'backend' pair, got:onnxruntime_onnx, pytorch",
        ),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, config: str | None, versions: list[str], says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_model(make(tmp_path, "m", config, *versions))
    assert says in caught.value.message


@pytest.mark.parametrize(
    ("files", "says"),
    [
        (["model.onnx", "config.pbtxt"], "'m'; 'model.onnx' belongs into the folder of a version: m/1/model.onnx"),
        (["config.json", "a.safetensors"], "; 'a.safetensors' belongs into the folder of a version: m/1/a.safetensors"),
        (["labels.txt", "config.pbtxt"], "under the version policy of model 'm'"),
    ],
)
def test_files_beside_the_place_of_versions_are_named(tmp_path: Path, files: list[str], says: str) -> None:
    folder = make(tmp_path, "m", None)
    for file in files:
        (folder / file).write_text('{"architectures": ["LlamaForCausalLM"]}' if file == "config.json" else "")
    with pytest.raises(InvalidArgument) as caught:
        read_model(folder)
    assert caught.value.message.endswith(says)


@pytest.mark.parametrize(
    ("name", "config", "file", "backend", "platform", "filename"),
    [
        ("m", "", "model.onnx", "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        ("m", "", "model.pt", "pytorch", "pytorch_libtorch", "model.pt"),
        ("m", 'backend: "pytorch"', "model.pt2", "pytorch", "pytorch_libtorch", "model.pt2"),
        ("m", 'platform: "onnxruntime_onnx"', "", "onnxruntime", "onnxruntime_onnx", "model.onnx"),
        ("m.identity", "", "", "identity", "", "model.identity"),
        ("m", 'backend: "identity" default_model_filename: "x"', "", "identity", "", "x"),
    ],
)
def test_finding_the_backend(
    tmp_path: Path, name: str, config: str, file: str, backend: str, platform: str, filename: str
) -> None:
    model = make(tmp_path, name, config, "1", checkpoint=False)
    if file:
        (model / "1" / file).write_bytes(b"")
    found = read_model(model).config
    assert (found["backend"], found["platform"], found["default_model_filename"]) == (backend, platform, filename)


def test_an_unguessable_backend(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="Could not determine backend for model 'm'") as caught:
        read_model(make(tmp_path, "m", None, "1", checkpoint=False))
    assert caught.value.field == "backend"


def test_a_mark_changes_with_what_it_marks(tmp_path: Path) -> None:
    model = make(tmp_path, "m", "", "1", "2")
    [first] = read_model(model).versions
    assert read_model(model).versions == (first,)
    (model / "1" / "config.json").write_text("{ }")
    assert read_model(model).versions == (first,)
    (model / "2" / "config.json").write_text("{ }")
    [second] = read_model(model).versions
    assert second != first
    (model / "config.pbtxt").write_text("max_batch_size: 2")
    [third] = read_model(model).versions
    assert third != second
    for folder in ("warmup", "utils/deep"):
        (model / folder).mkdir(parents=True)
        (model / folder / "data").write_bytes(b"\0")
        [last] = read_model(model).versions
        assert last != third
        third = last
    for folder in ("configs", "2/__pycache__", "utils/__pycache__"):
        (model / folder).mkdir()
        (model / folder / "other.pbtxt").write_text("")
        assert read_model(model).versions == (third,)


def test_a_catalog_of_several_repositories(tmp_path: Path) -> None:
    for repository, names in (("one", "ab"), ("two", "bc")):
        for name in names:
            make(tmp_path / repository, name, None, "1")
    (tmp_path / "one" / "README.md").write_text("not a model")
    (tmp_path / "one" / ".git").mkdir()
    os.mkdir(os.fsencode(tmp_path / "one") + b"/\xff")  # in no answer, and in no metric
    single = checkpoint_source(str(tmp_path / "two" / "c" / "1"), ["c"])
    catalog = RepositoryCatalog([tmp_path / "one", tmp_path / "two"], single)
    assert catalog.model_names() == ["c", "a", "b"]
    assert catalog.read("a").directory == tmp_path / "one" / "a"
    for name, places in (("b", ("one/b", "two/b")), ("c", ("two/c", "two/c/1"))):
        said = " and ".join(str(tmp_path / place) for place in places)
        with pytest.raises(AlreadyExists, match=f"model '{name}' is not unique .*: {said}; "):
            catalog.read(name)
    assert RepositoryCatalog([], single).read("c") is single


def test_another_name_of_a_checkpoint_is_no_models_beside_it(tmp_path: Path) -> None:
    make(tmp_path / "models", "gpt", None, "1")
    single = checkpoint_source(str(tmp_path / "models" / "gpt" / "1"), ["own", "gpt", "other"])
    catalog = RepositoryCatalog([tmp_path / "models"], single)
    assert catalog.read("own") is single
    with pytest.raises(AlreadyExists, match=r"model 'gpt' in .*models/gpt: the checkpoint .* by --served-model-name"):
        catalog.read("gpt")
    with pytest.raises(NotFound):
        catalog.read("other")


def test_a_repository_that_is_given_twice_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make(tmp_path / "one", "a", None, "1")
    (tmp_path / "link").symlink_to("one")
    monkeypatch.chdir(tmp_path)
    catalog = RepositoryCatalog([Path("one"), tmp_path / "one", Path("one/../one"), tmp_path / "link"])
    assert catalog.read("a").directory == Path("one/a")


def test_binary_rubbish_in_a_config(tmp_path: Path) -> None:
    make(tmp_path, "a", None, "1")
    (tmp_path / "a" / "config.pbtxt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InvalidArgument, match=r"config\.pbtxt"):
        RepositoryCatalog([tmp_path]).read("a")


@pytest.mark.parametrize("name", ["b", "x" * 300, "x\0"])
def test_no_such_model(tmp_path: Path, name: str) -> None:
    with pytest.raises(NotFound, match="no model repository has a folder"):
        RepositoryCatalog([tmp_path]).read(name)


def test_no_such_repository(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="is not a directory"):
        RepositoryCatalog([tmp_path / "nowhere"])


def test_one_model_of_a_repository_is_told_from_a_checkpoint(tmp_path: Path) -> None:
    for config in ("", None):
        model = make(tmp_path / str(config), "m", config, "1")
        with pytest.raises(InvalidArgument, match=f"a model of a repository: give --model-repository {model.parent}"):
            checkpoint_source(str(model))


def test_telling_repositories_from_checkpoints(tmp_path: Path) -> None:
    model = make(tmp_path / "repository", "m", None, "1") if (tmp_path / "repository").mkdir() is None else None
    assert model is not None
    assert is_repository(tmp_path / "repository")
    assert not is_repository(model / "1")
    assert not is_repository(tmp_path)
    (tmp_path / "checkpoints" / "m").mkdir(parents=True)
    (tmp_path / "checkpoints" / "m" / "config.json").write_text("{}")
    assert not is_repository(tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "m" / "1").mkdir()
    assert is_repository(tmp_path / "checkpoints")


def test_a_checkpoint_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = make(tmp_path, "m", None, "1") / "1"
    assert checkpoint_source(str(version), ["served", "also"]).name == "served"
    monkeypatch.chdir(version)
    here = checkpoint_source(".", parameters={"ahead": "1"})
    assert (here.name, here.backend, here.versions[0].path) == ("1", "charonia", str(version))
    assert here.parameters == {"ahead": "1"}
    from_hub = checkpoint_source("owner/Name-1.5B")
    assert (from_hub.name, from_hub.versions[0].path) == ("Name-1.5B", "owner/Name-1.5B")


@pytest.mark.parametrize("model", ["", "nowhere", "/no/where", "a/b/c", "."])
def test_neither_checkpoint_nor_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match=r"is neither a checkpoint|there is no directory"):
        checkpoint_source(model)


@pytest.mark.parametrize("said", ['platform: "onnxruntime_onnx"', 'backend: "onnxruntime"'])
def test_an_ensemble_of_another_platform_is_called_by_its_name(tmp_path: Path, said: str) -> None:
    model = make(tmp_path, "m", f"{said}\nensemble_scheduling {{ }}", "1")
    with pytest.raises(InvalidArgument) as caught:
        read_model(model)
    platform = said.split('"')[1]
    text = f"ensemble scheduling cannot be set for model 'm' whose platform is {platform}"
    assert caught.value.message == f"{model}/config.pbtxt:2: {text}"
