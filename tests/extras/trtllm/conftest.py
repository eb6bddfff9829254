"""A fake TensorRT-LLM of a version, installed for one test."""

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from ...docs.conftest import _codes, page
from ...engine.conftest import words

__all__ = ["_codes", "page", "words"]

VERSION = "1.2.0"


@pytest.fixture
def fake(sibling: Callable[[str], ModuleType]) -> ModuleType:
    return sibling("extras/trtllm/fake.py")


@pytest.fixture
def install(fake: ModuleType, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Put a version in place; the fake package."""

    # Finding a package sets it, for the process.
    monkeypatch.setenv("TRTLLM_NO_USAGE_STATS", "1")

    def install(version: str = VERSION) -> Any:
        return fake.FakePackage(version).install(monkeypatch)

    return install


@pytest.fixture
def package(install: Callable[..., Any]) -> Any:
    """The fake, installed."""
    return install()
