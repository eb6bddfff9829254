"""What every test may need."""

import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import settings

# Two shared cores: a deadline per example would test the neighbours.
settings.register_profile("charonia", deadline=None)
settings.load_profile("charonia")

# Nothing under test may reach for a hub.
os.environ["HF_HUB_OFFLINE"] = "1"


@pytest.fixture(scope="session")
def root() -> Path:
    """The repository's root."""
    return Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def sibling(root: Path) -> Callable[[str], ModuleType]:
    """Another file of tests/, by its path there: with importlib import mode the folder is on no path."""
    loaded: dict[str, ModuleType] = {}

    def load(path: str) -> ModuleType:
        if path not in loaded:
            name = f"tests_{path.removesuffix('.py').replace('/', '_')}"
            spec = importlib.util.spec_from_file_location(name, root / "tests" / path)
            assert spec
            assert spec.loader
            loaded[path] = sys.modules[name] = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(loaded[path])
        return loaded[path]

    return load


@pytest.fixture(scope="session")
def making(sibling: Callable[[str], ModuleType]) -> ModuleType:
    """tests/checkpoints.py"""
    return sibling("checkpoints.py")
