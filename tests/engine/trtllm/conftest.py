"""A fake TensorRT-LLM of a version, installed for one test."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from charonia.engine.trtllm.package import TrtllmPackage

OLD, NEW = "1.2.0", "1.3.0"


@pytest.fixture
def fake(sibling: Callable[[str], ModuleType]) -> ModuleType:
    return sibling("engine/trtllm/fake.py")


@pytest.fixture
def install(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Put a version in place; the fake package."""

    # Finding a package sets it, for the process.
    monkeypatch.setenv("TRTLLM_NO_USAGE_STATS", "1")

    def install(version: str = NEW) -> Any:
        return fake.FakePackage(version).install(monkeypatch)

    return install


@pytest.fixture(params=[OLD, NEW])
def package(request: pytest.FixtureRequest, install: Callable[..., Any]) -> TrtllmPackage:
    """Each world in turn, as the adapter finds it."""
    install(request.param)
    return TrtllmPackage.find()


@pytest.fixture
def found(install: Callable[..., Any]) -> Callable[[str], TrtllmPackage]:
    """A version of one's choice, as the adapter finds it."""

    def find(version: str) -> TrtllmPackage:
        install(version)
        return TrtllmPackage.find()

    return find
