"""Backends that packages bring: language models and compositions beside classic ones, and what of them is broken."""

from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from charonia.core.backends import CompositionBackend, TextBackend
from charonia.core.errors import InvalidArgument
from charonia.repository import backend_registry
from charonia.repository.backend_registry import (
    checkpoint_backends,
    classic_runtime_loader,
    find_native_backend,
    is_composition,
    is_own_backend,
    is_text_backend,
    is_written_in_python,
    text_backend,
)
from charonia.repository.builder import parse_backend_config

SPEAKER = TextBackend(lambda *_, **__: None, serves_checkpoints=True)  # type: ignore[arg-type, return-value]
ROUND = CompositionBackend(lambda *_: None)  # type: ignore[arg-type, return-value]
NOTHING = object()


def find_spoken(raw: Any, directory: Path) -> str | None:
    return "speaker" if raw["name"] == "spoken" else None


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    backends = {"speaker": "SPEAKER", "round": "ROUND", "nothing": "NOTHING", "charonia": "NOTHING"}
    groups = {"charonia.backends": backends, "charonia.native_models": {"any": "find_spoken"}}

    def installed_extensions(group: str) -> dict[str, EntryPoint]:
        entries = {name: EntryPoint(name, f"{__name__}:{value}", group) for name, value in groups[group].items()}
        return entries | ({"broken": EntryPoint("broken", "nowhere:X", group)} if group == "charonia.backends" else {})

    monkeypatch.setattr(backend_registry, "installed_extensions", installed_extensions)


@pytest.mark.usefixtures("installed")
def test_the_kind_of_a_backend_is_that_of_what_its_entry_names() -> None:
    names = ("speaker", "round", "nothing", "broken", "charonia", "pipeline", "identity", "unknown")
    assert [name for name in names if is_text_backend(name)] == ["speaker", "charonia"]
    assert [name for name in names if is_composition(name)] == ["round", "pipeline"]
    assert [name for name in names if is_written_in_python(name)] == ["unknown"]
    assert [name for name in names if is_own_backend(name)] == ["charonia", "pipeline", "identity"]
    assert text_backend("speaker") is SPEAKER
    assert text_backend("charonia") is not NOTHING, "a name of ours stays ours"
    assert list(checkpoint_backends()) == ["charonia", "speaker", "encoder"]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("backend", "says"),
    [
        ("nothing", r"backend 'nothing': .*:NOTHING is no RuntimeLoader: it has no load\(\)"),
        ("broken", "backend 'broken' of nowhere:X cannot be imported: ModuleNotFoundError"),
    ],
)
def test_what_is_no_backend_says_so_when_a_model_of_it_loads(backend: str, says: str) -> None:
    assert text_backend(backend) is None
    with pytest.raises(InvalidArgument, match=says):
        classic_runtime_loader(backend, None)


@pytest.mark.usefixtures("installed")
def test_a_package_serves_models_in_the_place_of_their_code(tmp_path: Path) -> None:
    assert find_native_backend({"name": "spoken"}, tmp_path) == "speaker"
    assert find_native_backend({"name": "other"}, tmp_path) is None


def test_parameters_of_a_backend_that_there_is_not_are_told(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "model.py").touch()
    flags = ["k=v", "mine,k=v", "python,k=v", "tensorrtllm,a=1", "tensorrt-llm,b=2", "onnxruntim,k=v", "dali,k=v"]
    settings = parse_backend_config(flags, tmp_path)
    assert settings["tensorrtllm"] == {"a": "1", "b": "2"}
    assert caplog.messages == [
        "--backend-config is for 'dali', a backend that there is not",
        "--backend-config is for 'onnxruntim', a backend that there is not; did you mean 'onnxruntime'?",
    ]
