"""Every test of a kernel runs at every level that this machine has."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

import pytest
import torch
from torch import Tensor

from charonia.engine.cpu import library

ByThreads: TypeAlias = Callable[[Callable[[], Tensor]], list[Tensor]]

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


@pytest.fixture
def by_threads() -> Iterator[ByThreads]:
    """What a call returns with one thread, with two, and with three."""
    before = torch.get_num_threads()

    def call(compute: Callable[[], Tensor]) -> list[Tensor]:
        found = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(compute())
        return found

    yield call
    torch.set_num_threads(before)
