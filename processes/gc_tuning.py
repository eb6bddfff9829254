"""Memory in processes that serve: objects that last are left alone, large blocks are given back.

Nearly everything is freed as its last reference goes; Python's cycle collector is for cycles, which stay rare while
serving, and each of its rounds walks over what it could not free before. What is freed the C library keeps for later:
after a large request or response that is most of what the process holds.
"""

import gc
from collections.abc import Callable

from .host import release_free_memory

_THRESHOLDS = (20_000, 50, 100)
"""Objects that a young generation may gain before it is collected, and the rounds of it that older ones wait."""


def collect_less_often() -> None:
    """Called when a process starts: what it imports, which is tens of thousands of objects, is not garbage."""
    gc.set_threshold(*_THRESHOLDS)


def freeze_imports() -> None:
    """Called when a process has imported what it needs: to walk over all that takes a tenth of a second."""
    gc.freeze()


def collect_and_freeze(*, frozen_too: bool = True) -> None:
    """Called when a process begins to serve, and after a large change: free every unreachable cycle, those among frozen
    objects too unless it is said otherwise, and leave the others alone from now on."""
    if frozen_too:
        gc.unfreeze()
    gc.collect()
    gc.freeze()


LARGE_REQUEST_BYTES = 1 << 20
"""Bytes of a request after which memory is given back."""

_RELEASE_DELAYS = (2.0, 7.0, 20.0)
"""Seconds after the first large request, or response, since the last release; it may take a while."""

_scheduled_releases: set[float] = set()

memory_releases: set[Callable[[], None]] = set()
"""Called in the event loop's thread before memory is given back: each gives back what its owner holds for later."""


def release_memory_soon() -> None:
    """Return to the system, before long, the memory that a large request or response leaves free. For the event loop's
    thread."""
    import asyncio  # engine cores have no event loop

    for moment in _RELEASE_DELAYS:
        if moment not in _scheduled_releases:
            _scheduled_releases.add(moment)
            asyncio.get_running_loop().call_later(moment, _release, moment)


def _release(moment: float) -> None:
    import asyncio

    _scheduled_releases.discard(moment)
    for release in tuple(memory_releases):
        release()
    asyncio.get_running_loop().run_in_executor(None, release_free_memory)
