"""The workers' processes: started, told to stop, and started again when they are lost."""

import asyncio
import logging
import os
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any, TypeAlias

from ..core.errors import Unavailable
from ..core.metrics import Measurement, Reading
from ..core.tasks import wait_for_first
from ..processes.child_process import ChildProcess, RestartBackoff, describe_exit, python_child
from ..processes.host import resident_memory_of
from ..processes.shared_arena import new_arena_file
from .hub import ControlHub
from .tensors import ARENA_BYTES
from .worker_session import WorkerSession

log = logging.getLogger(__name__)

WORKER_NAME = "charonia-front"
"""The name of a worker's process."""

_SILENT_DEATHS = 3
"""Workers that ended before they listened, after which the first start is given up."""

_STOP_SECONDS = 5.0
"""Seconds for a worker to leave by itself once it was told to: what is written may take that long to reach clients."""

_EXIT_SECONDS = 1.0
"""Seconds for a process whose link has ended to say why it ends."""

_FIRST_RETRY, _LAST_RETRY, _STABLE = 0.1, 30.0, 5.0
"""Seconds before a lost worker is started again, at first and at most, and for which one has to last to count."""


WorkerMain: TypeAlias = Callable[[Any, str, Connection, int, int], None]


class WorkerPool:
    """`count` workers over one hub; to the server it is an endpoint, which starts, may end, and is stopped.

    Their processes run `main` with `setup`, their name, the link's socket, and the files of their shared memory and of
    the hub's.
    """

    def __init__(self, hub: ControlHub, count: int, main: WorkerMain, setup: object) -> None:
        self.hub = hub
        self._count = count
        self._main = main
        self._setup = setup
        self._keepers: list[asyncio.Task[None]] = []
        self._sessions: dict[int, WorkerSession] = {}
        self._children: dict[int, ChildProcess] = {}
        self._started = [asyncio.Event() for _ in range(count)]
        self._stopping = asyncio.Event()
        self._late = False  # a worker did not leave in time
        self._restarts = 0

    async def start(self) -> None:
        """Return when all of them listen.

        Raises:
            Unavailable: one ends again and again before it does.
        """
        self._begin()
        await wait_for_first(self._all_started(), self.ended())

    async def start_possible(self) -> list[Unavailable]:
        """As `start`, but go on without those that end again and again; their errors. Returns early after `stop`."""
        self._begin()
        starts = zip(self._started, self._keepers, strict=True)
        waits = (wait_for_first(started.wait(), asyncio.shield(keeper)) for started, keeper in starts)
        results = await asyncio.gather(*waits, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException) and not isinstance(result, Unavailable):
                raise result
        return [result for result in results if isinstance(result, Unavailable)]

    def _begin(self) -> None:
        self.hub.start()
        self._keepers = [asyncio.create_task(self._keep(number)) for number in range(self._count)]

    @property
    def count(self) -> int:
        """The workers that are wanted."""
        return self._count

    @property
    def listening(self) -> int:
        """The workers that take connections now."""
        return sum(worker.listening.is_set() and not worker.lost.is_set() for worker in self._sessions.values())

    def resident_memory(self) -> int:
        """Bytes that the workers' processes hold, and their children."""
        return resident_memory_of(child.pid for child in self._children.values())

    def measure(self) -> Iterator[Measurement]:
        """The number of lost workers that were started again, and the event loops of all there are, for a scrape."""
        yield Measurement({}, [Reading("charonia_frontend_restarts_total", self._restarts)])
        for number, session in self._sessions.items():
            yield Measurement({}, [*session.loop_readings({"frontend": str(number + 1)})])

    async def _all_started(self) -> None:
        for started in self._started:
            await started.wait()

    async def ended(self) -> None:
        """Return after `stop`, or raise when workers cannot be started."""
        await asyncio.gather(*(asyncio.shield(keeper) for keeper in self._keepers))

    async def stop(self, force: bool) -> None:
        """Close all sockets; with `force`, what still runs is told so and ended."""
        self._stopping.set()
        await self.hub.close()
        for session in self._sessions.values():
            session.stop(force)
        if self._keepers:
            _, late = await asyncio.wait(self._keepers, timeout=_STOP_SECONDS)
            self._late = bool(late)
            for keeper in late:  # its process is killed
                keeper.cancel()
            await asyncio.wait(self._keepers)

    async def _keep(self, number: int) -> None:
        """Run one worker after the other, until there is to be none."""
        backoff = RestartBackoff(_FIRST_RETRY, _LAST_RETRY, _STABLE)
        deaths = 0
        name = f"frontend {number + 1}"
        while not self._stopping.is_set():
            began = time.monotonic()
            listened = False
            try:
                exit_code, listened = await self._run(number, name)
                why = describe_exit(exit_code)
            except OSError as error:
                why = f"it cannot be started: {error}"
            if self._stopping.is_set():
                break
            deaths = 0 if listened else deaths + 1
            if deaths >= _SILENT_DEATHS and not self._started[number].is_set():
                raise Unavailable(f"{name} cannot be started: {why}, {deaths} times")
            self._restarts += 1
            log.error("%s is gone: %s; it is being restarted", name, why)
            delay = backoff.next_delay(time.monotonic() - began if listened else 0.0)
            await wait_for_first(self._stopping.wait(), timeout=delay)

    async def _run(self, number: int, name: str) -> tuple[int, bool]:
        """The exit code of one worker, and whether it took connections."""
        with ExitStack() as files:
            ours, theirs = (files.enter_context(end) for end in Pipe())
            memory = [new_arena_file(ARENA_BYTES) for _ in range(2)]
            for file in memory:
                files.callback(os.close, file)
            child = self._children[number] = python_child(
                WORKER_NAME, self._main, self._setup, name, theirs, *reversed(memory), inherited=memory
            )
            session = self._sessions[number] = WorkerSession(self.hub, name, *memory)
            sock = socket.socket(fileno=os.dup(ours.fileno()))
        try:
            loop = asyncio.get_running_loop()
            await loop.create_unix_connection(lambda: session.link, sock=sock)
            await self._watch(child, session, number, name)
        finally:
            session.link.close()
            patience = 0.0 if self._late else _STOP_SECONDS if self._stopping.is_set() else _EXIT_SECONDS
            exit_code = await asyncio.to_thread(child.close, patience)
        return exit_code, session.listening.is_set()

    async def _watch(self, child: ChildProcess, session: WorkerSession, number: int, name: str) -> None:
        """Return when the process has ended, or its link."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        loop.add_reader(child.sentinel, ended.set)
        try:
            await wait_for_first(session.listening.wait(), session.lost.wait(), ended.wait())
            if session.listening.is_set():
                if self._started[number].is_set():
                    log.info("%s serves again", name)
                self._started[number].set()
                await wait_for_first(session.lost.wait(), ended.wait())
        finally:
            loop.remove_reader(child.sentinel)
