"""Kernels under Triton's interpreter, on the CPU (tests/conftest.py asks for it)."""

import pkgutil
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import pytest

from charonia.engine import gpu
from charonia.engine.cpu import library


@pytest.fixture(scope="session")
def kernels() -> dict[str, ModuleType]:
    """The modules of engine/gpu, by name."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    names = [module.name for module in pkgutil.iter_modules(gpu.__path__)]
    return {name: import_module(f"{gpu.__name__}.{name}") for name in names}


@pytest.fixture
def interpreted(kernels: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers and backends that a test builds in this process are those of a GPU."""
    monkeypatch.setenv(library.LEVEL_VARIABLE, "triton")
    monkeypatch.setattr(library, "level", lambda: None)
