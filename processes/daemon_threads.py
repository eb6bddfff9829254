"""Threads for calls that may hang, as those of a file system do: no exit of the process waits for them."""

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue

log = logging.getLogger(__name__)


class DaemonThreads:
    """So many threads, which make calls in the order in which they are given; what a call raises is logged. `begin` is
    called first, in each."""

    def __init__(self, name: str, count: int, begin: Callable[[], None] = lambda: None) -> None:
        self._calls: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._begin = begin
        self._threads = [threading.Thread(target=self._run, name=name, daemon=True) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def start(self, call: Callable[[], None]) -> None:
        self._calls.put(call)

    def _run(self) -> None:
        self._begin()
        while (call := self._calls.get()) is not None:
            try:
                call()
            except Exception:
                log.exception("a call in %s failed", threading.current_thread().name)

    def close(self, seconds: float = 0.0) -> None:
        """Make the calls that wait, for so long at most, and no others."""
        for _ in self._threads:
            self._calls.put(None)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        with suppress(Empty):
            while True:
                self._calls.get_nowait()
        for _ in self._threads:
            self._calls.put(None)
