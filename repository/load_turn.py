"""Turns at what one load at a time may have, which end for those that take too long."""

import asyncio
import time
from collections.abc import Callable
from typing import Self


class Turn:
    """A block in which a lock, or a place of a semaphore, is held; who takes longer than `patience` seconds, without a
    word of progress, goes on without it, and others go on beside. `on_expired` is called then."""

    def __init__(
        self, lock: asyncio.Lock | asyncio.Semaphore, patience: float, on_expired: Callable[[], None] = lambda: None
    ) -> None:
        self._lock = lock
        self._patience = patience
        self._on_expired = on_expired
        self._timer: asyncio.TimerHandle | None = None
        self._renewed = 0.0

    def renew(self) -> None:
        """There is progress; from any thread."""
        self._renewed = time.monotonic()

    async def __aenter__(self) -> Self:
        await self._lock.acquire()
        self.renew()
        self._timer = asyncio.get_running_loop().call_later(self._patience, self._look)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end()

    def _look(self) -> None:
        left = self._renewed + self._patience - time.monotonic()
        if left > 0:
            self._timer = asyncio.get_running_loop().call_later(left, self._look)
        else:
            self._end()
            self._on_expired()

    def _end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
            self._lock.release()
