"""Workers that are started when the server's own process is busy with requests, and not before."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress

from ..processes.host import available_memory
from ..telemetry.loop_lag import BusyLimit, BusyWindow
from .supervisor import WorkerPool

log = logging.getLogger(__name__)

_LOOKS = 5
"""Looks at the event loop's thread in a window."""

_MEMORY = 256 << 20
"""Bytes that have to be free for each worker: twice what it takes without tokenizers."""

_MIB = 1 << 20


class GrowingPool:
    """A pool of workers beside the server's own sockets, which answer until it has started, and what they have accepted
    to its end. It starts once, when the event loop is beyond a limit, and stays; where none can be started the log says
    so once. To the server it is an endpoint as `WorkerPool`."""

    def __init__(
        self,
        pool: WorkerPool,
        limit: BusyLimit,
        on_grown: Callable[[int], None],
        free_memory: Callable[[], int] = available_memory,
    ) -> None:
        """`on_grown`: called with the number of workers that take connections by then."""
        self._pool = pool
        self._limit = limit
        self._on_grown = on_grown
        self._free_memory = free_memory
        self._told_of_memory = False
        self._watching: asyncio.Task[None] | None = None
        self._begun = False
        self._stopping = asyncio.Event()

    async def start(self) -> None:
        """Watch the event loop from now on."""
        self._watching = asyncio.create_task(self._watch())

    async def ended(self) -> None:
        """Return after `stop`: workers that are lost come again, and without any the server goes on."""
        await self._stopping.wait()

    async def stop(self, force: bool) -> None:
        """As `WorkerPool.stop`."""
        self._stopping.set()
        if self._begun:
            await self._pool.stop(force)
        if self._watching is not None:
            self._watching.cancel()
            with suppress(asyncio.CancelledError):
                await self._watching

    async def _watch(self) -> None:
        window, limit = BusyWindow(_LOOKS), self._limit
        while True:
            await asyncio.sleep(limit.seconds / _LOOKS)
            busy = window.look()
            if busy > limit.busy and not self._pool.hub.gateway.exiting() and self._has_memory():
                try:
                    await self._grow(busy)
                except Exception:
                    log.exception("frontends could not be started: the server goes on as one process")
                    await self._give_up()
                return

    def _has_memory(self) -> bool:
        free, needed = self._free_memory(), self._pool.count * _MEMORY
        if free < needed and not self._told_of_memory:
            self._told_of_memory = True
            log.warning(
                "the event loop is full, and there is no memory for %d frontends: they want %d MiB free, and %d are; "
                "they are started when there are more",
                *(self._pool.count, needed / _MIB, free / _MIB),
            )
        return free >= needed

    async def _grow(self, busy: float) -> None:
        count = self._pool.count
        log.info(
            "the event loop computed %.0f %% of %g s: starting %d frontends", 100 * busy, self._limit.seconds, count
        )
        self._begun = True
        failures = await self._pool.start_possible()
        if self._stopping.is_set():
            return
        for failure in failures[:1]:
            log.error("%s", failure.message)
        if len(failures) == count:
            log.error("no frontend could be started: the server goes on as one process")
            await self._give_up()
            return
        self._on_grown(count - len(failures))
        log.info(
            "%d frontends take new connections; they hold %d MiB",
            *(count - len(failures), self._pool.resident_memory() / _MIB),
        )

    async def _give_up(self) -> None:
        """End the workers that run, which would go on taking connections."""
        await self._pool.stop(force=False)
        self._begun = False
