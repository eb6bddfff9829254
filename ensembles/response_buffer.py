"""The way of responses from the task that makes them, the driver, to the one that reads them.

What is not read holds up the driver. The driver ends with its reader: it is cancelled, and waited for.
"""

import asyncio
import logging
from collections import deque
from collections.abc import AsyncGenerator, Coroutine

from ..core.request import InferResponse

log = logging.getLogger(__name__)

_MAX_UNREAD = 64
"""Responses that wait for their reader before the driver does."""


class ResponseBuffer:
    """The responses of one request. `patience`: seconds that a cancelled driver may take to end, before it is left to
    itself; None for as long as it takes."""

    def __init__(self, patience: float | None = None) -> None:
        self._patience = patience
        self._responses: deque[InferResponse] = deque()
        self._arrived, self._read = asyncio.Event(), asyncio.Event()

    async def put(self, response: InferResponse) -> None:
        """Called by the driver, or by tasks of its own."""
        await self.wait_for_room()
        self.append(response)

    def append(self, response: InferResponse) -> None:
        """The same without waiting; then the driver waits for room itself."""
        self._responses.append(response)
        self._arrived.set()

    async def wait_for_room(self) -> None:
        while len(self._responses) >= _MAX_UNREAD:
            self._read.clear()
            await self._read.wait()

    async def read(self, drive: Coroutine[None, None, None], name: str) -> AsyncGenerator[InferResponse, None]:
        """Run the driver, as a task of that name. Raises what it raises."""
        driver = asyncio.create_task(drive, name=name)
        driver.add_done_callback(lambda _: self._arrived.set())
        try:
            while not driver.done() or self._responses:
                while self._responses:
                    self._read.set()
                    yield self._responses.popleft()
                self._arrived.clear()
                if not driver.done():
                    await self._arrived.wait()
            driver.result()
        finally:
            driver.cancel()
            await asyncio.wait({driver}, timeout=self._patience)
            if driver.done():
                driver.cancelled() or driver.exception()
            else:
                driver.cancel()
                asyncio._unregister_task(driver)  # the end of the loop would wait for it
                stack = driver.get_stack(limit=1)
                where = "".join(f", at {frame.f_code.co_filename}:{frame.f_lineno}" for frame in stack)
                log.error("%s does not end though it was cancelled %g s ago%s", name, self._patience, where)
