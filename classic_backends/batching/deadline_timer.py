"""One timer of the event loop, set to the earliest of the times that were asked for."""

import asyncio
import time
from collections.abc import Callable


class DeadlineTimer:
    """Calls `ring` in the event loop's thread. `due`: when, in nanoseconds of `time.monotonic_ns`; None: never."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self.due_at: int | None = None

    def set_no_later_than(self, until: int) -> None:
        """Ring at that time, unless it rings earlier anyway."""
        if self._stopped or (self.due_at is not None and self.due_at <= until):
            return
        if self._timer is not None:
            self._timer.cancel()
        self.due_at = until
        self._timer = self._loop.call_later(max(0, until - time.monotonic_ns()) / 1e9, self._go)

    def stop(self) -> None:
        """Never ring again."""
        self._stopped, self.due_at = True, None
        if self._timer is not None:
            self._timer.cancel()

    def _go(self) -> None:
        self._timer = self.due_at = None
        self._ring()
