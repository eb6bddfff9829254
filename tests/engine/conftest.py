"""Tiny checkpoints on disk, made once per run, and what transformers generates with them."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.fixture(scope="session")
def checkpoint(making: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A directory with the named configuration of tests/checkpoints.py, changed by keywords."""
    made: dict[str, Path] = {}

    def make(name: str = "llama", **changes: Any) -> Path:
        key = f"{name}-{sorted(changes.items())}"
        if key not in made:
            made[key] = making.write_checkpoint(tmp_path_factory.mktemp(name), making.CONFIGS[name] | changes)
        return made[key]

    return make
