"""What the command line may ask to serve."""

import os
import sys
from pathlib import Path
from typing import Any, Literal

import pytest

from charonia.cli.model_selection import ProgressDisplay, engine_settings, parse_lora_modules, select_models
from charonia.cli.options import AdapterOptions, ConfigOptions, RepositoryOptions
from charonia.core.errors import InvalidArgument
from charonia.engine.options import EngineOptions
from charonia.repository.backend_registry import check_backend, checkpoint_backends
from charonia.repository.gateway import InProcessGateway


@pytest.mark.parametrize("backend", ["onnxruntime", "nonsense"])
def test_what_serves_no_checkpoint_is_refused_by_its_flag(tmp_path: Path, backend: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidArgument) as refused:
        select_models(str(tmp_path), RepositoryOptions(backend=backend), {})
    *others, last = checkpoint_backends()
    served = f"{', '.join(others)} and {last} do"
    assert refused.value.message == f"--backend {backend} serves no checkpoint; {served}"


@pytest.mark.parametrize("mode", ["poll", "explicit"])
def test_nobody_controls_a_single_checkpoint(tmp_path: Path, mode: Literal["poll", "explicit"]) -> None:
    checkpoint, repository = tmp_path / "checkpoint", tmp_path / "repository"
    checkpoint.mkdir()
    repository.mkdir()
    (checkpoint / "config.json").write_text("{}")
    with pytest.raises(InvalidArgument, match=f"--model-control-mode {mode} is for a model repository"):
        select_models(str(checkpoint), RepositoryOptions(model_control_mode=mode), {})
    both = RepositoryOptions(model_control_mode=mode, model_repository=(str(repository),))
    assert not select_models(str(checkpoint), both, {}).is_single_checkpoint


@pytest.mark.parametrize("backend", ["", "charonia", "encoder"])
def test_what_may_serve_a_checkpoint(tmp_path: Path, backend: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert select_models(str(tmp_path), RepositoryOptions(backend=backend), {}).is_single_checkpoint


@pytest.mark.parametrize("path", ["./demo", "../demo", "/models/demo", "~/demo", "./no/such/demo"])
def test_a_path_is_no_hub_id(path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match=f"^there is no directory '{path}'$"):
        select_models(path, RepositoryOptions(), {})


def test_a_revision_goes_with_a_hub_id(tmp_path: Path) -> None:
    source = select_models("owner/name", RepositoryOptions(revision="refs/pr/3"), {}).catalog.read("name")
    assert [version.path for version in source.versions] == ["owner/name@refs/pr/3"]
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="--revision is for a model of the hub"):
        select_models(str(tmp_path), RepositoryOptions(revision="main"), {})
    with pytest.raises(
        InvalidArgument, match="--revision is for a single checkpoint; in a repository, the parameter 'model'"
    ):
        select_models(None, RepositoryOptions(revision="main", model_repository=(str(tmp_path),)), {})


@pytest.mark.parametrize(
    ("given", "names"),
    [(("a",), ["a"]), (("a", "b"), ["a", "b"]), (("a, b", "c"), ["a", "b", "c"]), (("a,a", "a"), ["a"])],
)
def test_a_checkpoint_may_have_several_names(tmp_path: Path, given: tuple[str, ...], names: list[str]) -> None:
    (tmp_path / "config.json").write_text("{}")
    source = select_models(str(tmp_path), RepositoryOptions(served_model_name=given), {}).catalog.read(names[0])
    assert [source.name, *source.aliases] == names


def test_names_that_are_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidArgument, match="--served-model-name: an empty name in 'a,'"):
        select_models(str(tmp_path), RepositoryOptions(served_model_name=("a,",)), {})
    with pytest.raises(
        InvalidArgument, match="name a checkpoint, before --served-model-name, which takes what follows"
    ):
        select_models(None, RepositoryOptions(served_model_name=("a", str(tmp_path))), {})


async def test_repositories_without_models_and_links_that_lead_nowhere_are_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "gone").symlink_to("/no/where")
    places = (str(tmp_path / "empty"), str(tmp_path / "linked"))
    selection = select_models(None, RepositoryOptions(model_repository=places), {})
    gateway = InProcessGateway(builder=selection.builder)
    assert await selection.load_startup_models(selection.create_watcher(gateway), strict=True)
    assert [record.getMessage() for record in caplog.records] == [
        f"model repository {places[0]} has no models: a model is a folder in it",
        f"model repository {places[1]} has no models: a model is a folder in it",
        f"no model: {places[1]}/gone is a link to '/no/where', which is not there",
    ]


@pytest.mark.parametrize("strict", [True, False])
async def test_a_start_that_needs_every_model_is_patient(tmp_path: Path, strict: bool) -> None:
    class Watcher:
        patient = False

        async def load_initial(self, names: object, listener: object, in_memory: object) -> bool:
            return False

    watcher: Any = Watcher()
    selection = select_models(None, RepositoryOptions(model_repository=(str(tmp_path),)), {})
    assert await selection.load_startup_models(watcher, strict) is not strict
    assert watcher.patient is strict


def test_flags_about_executions_are_parameters_of_all_backends(tmp_path: Path) -> None:
    configs = ConfigOptions(backend_config=("python,restart_pause_secs=3",), backend_directory=tmp_path / "none")
    options = RepositoryOptions(
        model_repository=(str(tmp_path),), restart_pause=0, execution_timeout_secs=2.5, configs=configs
    )
    builder = select_models(None, options, {}).builder
    assert builder.backends[""] == {"execution_timeout_secs": "2.5", "restart_pause_secs": "0"}
    assert builder.backends["python"] == {"restart_pause_secs": "3"}
    with pytest.raises(
        InvalidArgument, match=r"unknown backend 'no'; .* there is no directory '.*none' \(--backend-dir"
    ):
        check_backend("model", "no", builder.backend_directory)


def test_adapters_have_names_and_directories(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "loras/a=b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    given = (
        "sql=loras/a=b",
        "hub=owner/name@main",
        f'{{"name": "poet", "path": "{tmp_path}/x", "base_model_name": "gpt"}}',
        "home=~/x",
    )
    modules = parse_lora_modules(given)
    assert modules == {
        "sql": str(tmp_path / "loras/a=b"),
        "hub": "owner/name@main",
        "poet": f"{tmp_path}/x",
        "home": str(Path.home() / "x"),
    }
    assert "base_model_name of 'poet' has no effect" in caplog.text
    for wrong, text in (
        (("sql",), "must be NAME=DIRECTORY"),
        (("=x",), "needs a name and a directory"),
        (("sql=",), "needs a name and a directory"),
        (("{",), "must be NAME=DIRECTORY"),
        (('{"name": "a", "path": "b", "pah": 1}',), "must be NAME=DIRECTORY"),
        (("a=b", "a=c"), "the name 'a' is there twice"),
    ):
        with pytest.raises(InvalidArgument, match=f"--lora-modules.*{text}"):
            parse_lora_modules(wrong)


def test_an_adapter_that_is_not_there_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for place, lacks in (("none", "there is no directory"), ("empty", "there is no adapter_config.json in")):
        given = AdapterOptions(lora_modules=("hub=owner/name", f"sql={tmp_path / place}"))
        with pytest.raises(InvalidArgument, match=f"--lora-modules sql: {lacks} '{tmp_path / place}'"):
            engine_settings(EngineOptions(), given)
    (tmp_path / "empty/adapter_config.json").write_text("{}")
    assert "lora_modules" in engine_settings(EngineOptions(), given)


def test_no_adapter_is_called_as_its_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    options = RepositoryOptions(served_model_name=("gpt", "chat"))
    for name in ("gpt", "chat"):
        with pytest.raises(InvalidArgument, match=f"--lora-modules: the name '{name}' is the model's"):
            select_models(str(tmp_path), options, {"lora_modules": f'{{"sql": "/a", "{name}": "/b"}}'})
    with pytest.raises(InvalidArgument, match=r"--lora-modules is for a single checkpoint; .* config.pbtxt"):
        select_models(None, RepositoryOptions(model_repository=(str(tmp_path),)), {"lora_modules": "{}"})


def test_a_reader_of_the_output_who_leaves_is_told_of_when_all_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = os.pipe()
    os.close(theirs)
    loaded = []

    def load_all() -> None:
        with ProgressDisplay() as display:
            for name in ("one", "two"):
                display.on_loading(name)("weights", 1.0, 0.1, "")
                display.on_loaded(name, 0.1)
                loaded.append(name)

    with os.fdopen(ours, "w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(BrokenPipeError):
            load_all()
        monkeypatch.undo()
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
    assert loaded == ["one", "two"]
