"""Memory management of serving processes: what lasts is kept from Python's cycle collector, which would walk over it in
vain, and what the C library keeps for later returns to the system after large requests."""

import gc
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from .host import release_free_memory

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop

_THRESHOLDS = (20_000, 50, 100)
"""New objects until a young collection, and rounds until older generations are collected."""


def collect_less_often() -> None:
    """Called when a process starts: its imports, tens of thousands of objects, are no garbage."""
    gc.set_threshold(*_THRESHOLDS)


def freeze_imports() -> None:
    """Called after the imports, which take a tenth of a second to walk over."""
    gc.freeze()


_tunes = True


def leave_to_program() -> None:
    """Called where the server is part of a program, whose garbage is its own matter."""
    global _tunes
    _tunes = False


def collect_and_freeze(*, frozen_too: bool = True) -> None:
    """Called when a process begins to serve, and after a large change: free all unreachable cycles, by default among
    frozen objects too, and freeze the rest."""
    if not _tunes:
        return
    if frozen_too:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


LARGE_REQUEST_BYTES = 1 << 20
"""The size of a request after which memory is returned."""

_RELEASE_DELAYS = (2.0, 7.0, 20.0, 60.0)
"""Seconds from the first large request or response since the last release."""

_scheduled_releases: "WeakKeyDictionary[AbstractEventLoop, set[float]]" = WeakKeyDictionary()
"""By event loop: those of one that has ended come no more, and a program may start another."""

memory_releases: set[Callable[[], None]] = set()
"""Called in the event loop's thread before memory is returned: each frees what its owner keeps for later."""

late_releases: set[Callable[[], None]] = set()
"""The same, at the last of the delays alone: their owners take hundreds of megabytes for each request, which in a
virtual machine costs more than to compute with them."""


def release_memory_soon() -> None:
    """Schedule the return of memory that a large request or response frees. For the event loop's thread."""
    import asyncio  # engine cores have no event loop

    loop = asyncio.get_running_loop()
    scheduled = _scheduled_releases.setdefault(loop, set())
    for moment in _RELEASE_DELAYS:
        if moment not in scheduled:
            scheduled.add(moment)
            loop.call_later(moment, _release, moment)


def _release(moment: float) -> None:
    import asyncio

    loop = asyncio.get_running_loop()
    _scheduled_releases[loop].discard(moment)
    late = late_releases if moment == _RELEASE_DELAYS[-1] else ()
    for release in (*memory_releases, *late):
        release()
    loop.run_in_executor(None, release_free_memory)
