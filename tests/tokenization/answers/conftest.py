"""The recorded answers, one by one."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

_SPEC = importlib.util.spec_from_file_location("recorded_answers", Path(__file__).parent / "recorded.py")
assert _SPEC
assert _SPEC.loader
_RECORDED = sys.modules["recorded_answers"] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(_RECORDED)


@pytest.fixture(scope="session", params=_RECORDED.ANSWERS, ids=lambda answer: f"{answer.parser}: {answer.text[:32]!r}")
def answer(request: pytest.FixtureRequest) -> Any:
    return request.param


def _calls(answer: Any) -> bool:
    return bool(answer.calls) and answer in _RECORDED.WELL_FORMED


@pytest.fixture(
    scope="session",
    params=filter(_calls, _RECORDED.ANSWERS),
    ids=lambda answer: f"{answer.parser}: {answer.text[:32]!r}",
)
def calling_answer(request: pytest.FixtureRequest) -> Any:
    """One that is well-formed and has calls."""
    return request.param


@pytest.fixture(scope="session")
def recorded() -> Any:
    """The module of all of them."""
    return _RECORDED
