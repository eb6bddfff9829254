"""One budget: a language model, an encoder and three ONNX models load together, and what does not fit is refused."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import httpx
import pytest

from .models import write_model
from .serving import serving

MIB = 1 << 20
NAMES = ["encoder", "llm", "one", "three", "two"]


@pytest.fixture(scope="module")
def served(
    sibling: Callable[[str], ModuleType], tmp_path_factory: pytest.TempPathFactory, checkpoint: Path
) -> Iterator[Any]:
    repository = tmp_path_factory.mktemp("budget") / "models"
    sibling("encoder_models.py").write_embedder(repository / "encoder" / "1")
    write_model(repository, "llm", checkpoint)
    for name in ("one", "two", "three"):
        sibling("onnx_models.py").write_mlp(repository / name / "1" / "model.onnx", [4, 2])
    (repository / "huge" / "1").mkdir(parents=True)
    (repository / "huge" / "1" / "model.onnx").touch()
    os.truncate(repository / "huge" / "1" / "model.onnx", 1000 * MIB)
    arguments = ["--model-repository", str(repository), "--memory-limit", str(1200 * MIB)]
    arguments += ["--model-control-mode", "explicit", *(f"--load-model={name}" for name in NAMES)]
    with serving(repository.parent / "t", *arguments) as server:
        yield server
        assert server.stop() == 0, server.said


def load(served: Any, name: str) -> str:
    answer = httpx.post(f"{served.url}/v2/repository/models/{name}/load", timeout=60)
    return "" if answer.status_code == 200 else str(answer.json()["error"])


def test_they_load_together_without_anyones_share(served: Any) -> None:
    assert served.status("/v2/health/ready") == 200
    index = httpx.post(f"{served.url}/v2/repository/index").json()
    assert sorted(each["name"] for each in index if each.get("state") == "READY") == NAMES


def test_what_does_not_fit_is_refused_and_unloading_gives_back(served: Any) -> None:
    refused = load(served, "huge")
    assert "model 'huge' version 1 needs at least 1000.0 MiB of memory and " in refused
    assert " of 1.2 GiB is free; most is held by " in refused
    holders = refused.partition("most is held by ")[2]
    assert "'llm' version 1 (" in holders
    assert "'encoder' version 1 (" in holders
    for name in ("llm", "encoder"):
        httpx.post(f"{served.url}/v2/repository/models/{name}/unload")
    # Now it is the file that is wrong: it holds nothing.
    assert "onnxruntime cannot load" in load(served, "huge")
