"""The count of requests in flight, and waiting for the last of them."""

import asyncio


class InFlightCounter:
    """Requests that are in flight now: of one loaded model, or of the server."""

    __slots__ = ("_idle", "count")

    def __init__(self) -> None:
        self.count = 0
        self._idle: asyncio.Event | None = None

    def increment(self) -> None:
        self.count += 1

    def decrement(self) -> None:
        self.count -= 1
        if not self.count and self._idle is not None:
            self._idle.set()

    async def wait_drained(self) -> None:
        """Return when no request is in flight."""
        while self.count:
            self._idle = asyncio.Event()
            await self._idle.wait()
