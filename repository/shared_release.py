"""Giving back what models were made from and what they held, when the last who needs it has gone."""

from collections.abc import Callable

from ..processes import gc_tuning
from ..processes.host import release_free_memory


class SharedRelease:
    """What several versions are made from: released once, when the last of them has gone."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._holders = 1  # whoever loads them

    def add_holder(self) -> Callable[[], None]:
        self._holders += 1
        return self.drop_holder

    def drop_holder(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._release()


def release_both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    """One after the other."""

    def release() -> None:
        first()
        second()

    return release


def return_freed_memory() -> None:
    """To the system, what a model held, cycles included."""
    gc_tuning.collect_and_freeze()
    release_free_memory()
