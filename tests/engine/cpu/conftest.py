"""Every test of a kernel runs at every level that this machine has."""

from collections.abc import Iterator

import pytest

from charonia.engine.cpu import library

BEST = library.level()
HERE = library.LEVELS[: library.LEVELS.index(BEST) + 1] if BEST else ()


@pytest.fixture(params=HERE or [pytest.param("none", marks=pytest.mark.skip(reason="no C extension here"))])
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    with library.at_level(request.param):
        yield request.param
