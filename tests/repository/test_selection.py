"""What the command line may ask to serve."""

from pathlib import Path
from typing import Literal

import pytest

from charonia.core.errors import InvalidArgument
from charonia.repository.options import RepositoryOptions
from charonia.repository.selection import select


@pytest.mark.parametrize("backend", ["onnxruntime", "nonsense"])
def test_what_serves_no_checkpoint_is_refused_by_its_flag(tmp_path: Path, backend: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(InvalidArgument) as refused:
        select(str(tmp_path), RepositoryOptions(backend=backend), {})
    assert refused.value.message == f"--backend {backend} serves no checkpoint; charonia, tensorrtllm and encoder do"


@pytest.mark.parametrize("mode", ["poll", "explicit"])
def test_nobody_controls_a_single_checkpoint(tmp_path: Path, mode: Literal["poll", "explicit"]) -> None:
    checkpoint, repository = tmp_path / "checkpoint", tmp_path / "repository"
    checkpoint.mkdir()
    repository.mkdir()
    (checkpoint / "config.json").write_text("{}")
    with pytest.raises(InvalidArgument, match=f"--model-control-mode {mode} is for a model repository"):
        select(str(checkpoint), RepositoryOptions(model_control_mode=mode), {})
    both = RepositoryOptions(model_control_mode=mode, model_repository=(repository,))
    assert not select(str(checkpoint), both, {}).single


@pytest.mark.parametrize("backend", ["", "charonia", "tensorrt-llm", "encoder"])
def test_what_may_serve_a_checkpoint(tmp_path: Path, backend: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert select(str(tmp_path), RepositoryOptions(backend=backend), {}).single
