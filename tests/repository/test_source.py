"""Directories and config.pbtxt become sources; what is wrong is said with file, line and field."""

from pathlib import Path

import pytest

from charonia.core.errors import InvalidArgument
from charonia.repository.source import (
    BrokenSource,
    ModelSource,
    checkpoint_source,
    is_repository,
    read_model,
    read_repository,
)


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
    assert (source.name, source.backend, source.version) == ("m", "charonia", "10")
    assert source.path == str(tmp_path / "m" / "10")
    assert source.parameters == {"ahead": "1", "dtype": "float32"}
    assert source.where("dtype") == f"{tmp_path}/m/config.pbtxt:5: "


@pytest.mark.parametrize("config", [None, "", 'name: "m"'])
def test_a_checkpoint_completes_what_is_missing(tmp_path: Path, config: str | None) -> None:
    assert read_model(make(tmp_path, "m", config, "1")).backend == "charonia"


@pytest.mark.parametrize(
    ("config", "versions", "says"),
    [
        ('name: "m"\nbogus: 1', ["1"], 'config.pbtxt:2:1 : Message type "inference.ModelConfig" has no field named'),
        ('name: "m\n', ["1"], "config.pbtxt:1:7 : "),
        ("max_batch_size: true", ["1"], "config.pbtxt:1:17 : "),
        ('name: "other"', ["1"], "config.pbtxt: unexpected directory name 'm' for model 'other', directory name must"),
        (None, [], "at least one version must be available under the version policy of model 'm'"),
        (None, ["one"], "at least one version must be available under the version policy of model 'm'"),
    ],
)
def test_what_is_wrong_is_named(tmp_path: Path, config: str | None, versions: list[str], says: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        read_model(make(tmp_path, "m", config, *versions))
    assert says in caught.value.message


def test_an_unguessable_backend(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="Could not determine backend for model 'm'") as caught:
        read_model(make(tmp_path, "m", None, "1", checkpoint=False))
    assert caught.value.field == "backend"


def test_one_broken_model_leaves_the_others(tmp_path: Path) -> None:
    make(tmp_path, "a", "nonsense", "1")
    make(tmp_path, "b", None, "1")
    (tmp_path / "README.md").write_text("not a model")
    (tmp_path / ".git").mkdir()
    broken, good = read_repository(tmp_path)
    assert isinstance(broken, BrokenSource)
    assert isinstance(good, ModelSource)
    assert (broken.name, good.name) == ("a", "b")


def test_binary_rubbish_in_a_config(tmp_path: Path) -> None:
    make(tmp_path, "a", None, "1")
    (tmp_path / "a" / "config.pbtxt").write_bytes(b"\xff\xfe\x00")
    [broken] = read_repository(tmp_path)
    assert isinstance(broken, BrokenSource)
    assert "config.pbtxt" in broken.error.message


def test_no_such_repository(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="is not a directory"):
        list(read_repository(tmp_path / "nowhere"))


def test_telling_repositories_from_checkpoints(tmp_path: Path) -> None:
    model = make(tmp_path / "repository", "m", None, "1") if (tmp_path / "repository").mkdir() is None else None
    assert model is not None
    assert is_repository(tmp_path / "repository")
    assert not is_repository(model / "1")
    assert not is_repository(tmp_path)


def test_a_checkpoint_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    version = make(tmp_path, "m", None, "1") / "1"
    assert checkpoint_source(str(version), "served").name == "served"
    monkeypatch.chdir(version)
    assert checkpoint_source(".") == ModelSource("1", "charonia", str(version))
    assert checkpoint_source("owner/Name-1.5B") == ModelSource("Name-1.5B", "charonia", "owner/Name-1.5B")


@pytest.mark.parametrize("model", ["", "nowhere", "/no/where", "a/b/c", "."])
def test_neither_checkpoint_nor_hub_id(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match="is neither a checkpoint"):
        checkpoint_source(model)
