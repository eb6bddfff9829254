"""For which command lines the process of an engine core is started before they are read."""

from pathlib import Path

import pytest

from charonia.engine.core import prepared_core


@pytest.mark.parametrize(
    ("flags", "prepared"),
    [
        (["serve", "{checkpoint}", "--port", "1"], True),
        (["serve", "owner/name:Q4_K_M"], True),
        (["serve", "{checkpoint}/model.gguf"], True),
        (["serve", "{repository}"], False),
        (["serve", "{checkpoint}", "--tensor_parallel_size=2"], False),
        (["serve", "{checkpoint}", "--executor", "fake"], False),
        (["serve", "{checkpoint}", "--config", "serve.yaml"], False),
        (["serve", "--help"], False),
        (["check", "{checkpoint}"], False),
        ([], False),
    ],
)
def test_a_core_is_prepared_for_a_checkpoint_that_one_process_computes(
    flags: list[str], prepared: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint, repository = tmp_path / "model", tmp_path / "models"
    checkpoint.mkdir()
    (checkpoint / "config.json").touch()
    repository.mkdir()
    began: list[str] = []
    monkeypatch.setattr(prepared_core, "prepare_child", lambda name, *_: began.append(name))
    prepared_core.prepare_core([flag.format(checkpoint=checkpoint, repository=repository) for flag in flags])
    assert began == [prepared_core.CORE_NAME] * prepared


@pytest.mark.parametrize(
    ("variable", "prepared"),
    [("CHARONIA_TENSOR_PARALLEL_SIZE", False), ("CHARONIA_CONFIG", False), ("CHARONIA_HTTP_PORT", True)],
)
def test_variables_that_set_flags_count_as_those(
    variable: str, prepared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    began: list[str] = []
    monkeypatch.setattr(prepared_core, "prepare_child", lambda name, *_: began.append(name))
    monkeypatch.setenv(variable, "2")
    prepared_core.prepare_core(["serve", "owner/name"])
    assert began == [prepared_core.CORE_NAME] * prepared
