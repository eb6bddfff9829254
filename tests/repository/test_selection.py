"""What the command line may ask to serve."""

from pathlib import Path

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


@pytest.mark.parametrize("backend", ["", "charonia", "tensorrt-llm", "encoder"])
def test_what_may_serve_a_checkpoint(tmp_path: Path, backend: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    assert select(str(tmp_path), RepositoryOptions(backend=backend), {}).single
