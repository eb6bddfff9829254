"""Threads that stay and compute beside the caller's: crew.c has them, this makes and ends them."""

import os
import weakref
from collections.abc import Callable

from . import library


def start_thread_pool(owner: object) -> tuple[int, Callable[[], object]]:
    """The address of a crew that with the caller has as many threads as torch has now, and what ends it when everything
    begun is computed: at the latest when its `owner` is gone. It may be called again.

    Raises:
        MemoryError: the machine gives no more threads.
    """
    helpers = library.bind_function("charonia_threads")() - 1
    address: int | None = library.bind_function("charonia_crew")(helpers)
    if address is None:
        raise MemoryError(f"no {helpers} threads to compute with")
    return address, weakref.finalize(owner, _stop, address, os.getpid())


def _stop(address: int, process: int) -> None:
    """A forked process has the crew's memory, but none of its threads: it would wait for them for ever."""
    if os.getpid() == process:
        library.bind_function("charonia_dismiss")(address)
