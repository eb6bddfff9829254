"""Threads that stay and compute beside the caller's: crew.c has them, this makes and ends them."""

import os
import weakref
from collections.abc import Callable

from . import library


def crew(owner: object) -> tuple[int, Callable[[], object]]:
    """The address of a crew that with the caller has as many threads as torch has now, and what ends it when everything
    begun is computed: at the latest when its `owner` is gone. It may be called again.

    Raises:
        MemoryError: the machine gives no more threads.
    """
    helpers = library.bind("charonia_threads")() - 1
    address: int | None = library.bind("charonia_crew")(helpers)
    if address is None:
        raise MemoryError(f"no {helpers} threads to compute with")
    return address, weakref.finalize(owner, _dismiss, address, os.getpid())


def _dismiss(address: int, process: int) -> None:
    """A forked process has the crew's memory, but none of its threads: it would wait for them for ever."""
    if os.getpid() == process:
        library.bind("charonia_dismiss")(address)
