"""The tiny checkpoints of tests/checkpoints.py, without what the other tests need: this folder runs on GPU machines."""

import importlib.util
from collections.abc import Callable
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    spec = importlib.util.spec_from_file_location("gpu_checkpoints", Path(__file__).parent.parent / "checkpoints.py")
    assert spec
    assert spec.loader
    making = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(making)
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = making.write_checkpoint(tmp_path_factory.mktemp(name), making.CONFIGS[name])
        return made[name]

    return make
