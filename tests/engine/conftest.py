"""Tiny checkpoints on disk, made once per run, and what transformers generates with them."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


def _load_sibling(name: str) -> ModuleType:
    """tests/`name`.py: with importlib import mode the tests folder is on no path."""
    spec = importlib.util.spec_from_file_location(f"tests_{name}", Path(__file__).parent.parent / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def making() -> ModuleType:
    """tests/checkpoints.py"""
    return _load_sibling("checkpoints")


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
