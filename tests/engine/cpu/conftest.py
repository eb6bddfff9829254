"""Every test of a kernel runs at every level that this machine has."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest

from charonia.engine.cpu import library

BEST = library.level()
HERE = library.LEVELS[: library.LEVELS.index(BEST) + 1] if BEST else ()


@contextmanager
def run_at_level(name: str) -> Iterator[None]:
    before = library.level()
    assert before is not None
    library.bind_function("charonia_limit")(library.LEVELS.index(name))
    try:
        yield
    finally:
        library.bind_function("charonia_limit")(library.LEVELS.index(before))


@pytest.fixture
def at_level() -> Callable[[str], AbstractContextManager[None]]:
    """A block at the level of that name, or at the best below it that the machine has."""
    return run_at_level


@pytest.fixture(params=HERE or [pytest.param("none", marks=pytest.mark.skip(reason="no C extension here"))])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    with run_at_level(request.param):
        yield request.param
