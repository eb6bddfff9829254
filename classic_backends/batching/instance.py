"""The instances of a model: each a thread that loads its runtime, executes what it is given, and closes it.

Knows nothing of queues: takes one batch after another until there is none, and sleeps until it is woken.
"""

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, Protocol, TypeVar

from ..runtime import Runtime, RuntimeProcess
from .execution_timer import ExecutionTimer

log = logging.getLogger(__name__)

T = TypeVar("T")

_CLOSE_SECONDS = 30.0
"""How long an instance may take for what it executes before that is ended."""

_END_SECONDS = 5.0
"""How long it may take then before its thread is left to itself."""


class WorkSource(Protocol[T]):
    """Who has work for instances. Called by their threads."""

    def execute_batch(self, instance: "Instance[T]", work: T) -> None:
        """Never raises."""

    def next_batch(self, instance: "Instance[T]") -> T | None:
        """None: from now on `instance` is free, and will be woken."""


class Instance(Generic[T]):
    """One runtime and its thread. `name`: for messages and the thread."""

    def __init__(self, name: str, load: Callable[[], Runtime]) -> None:
        self.name = name
        self._load = load
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[Runtime] = self._loop.create_future()
        self._ended = asyncio.Event()
        self._inbox: SimpleQueue[WorkSource[T] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._live, name=name, daemon=True)
        self.runtime: Runtime
        self.process: RuntimeProcess | None = None
        self._end: Callable[[str], None] | None = None
        self.execution_timer = ExecutionTimer()
        self.current_batch: T | None = None
        """What it executes, read by the event loop."""

    async def start(self) -> None:
        """Return when it is loaded; raises what loading raises."""
        self._thread.start()
        self.runtime = await asyncio.shield(self._loaded)
        self.process, self._end = self.runtime.traits.process, self.runtime.traits.interrupt

    def wake(self, source: WorkSource[T]) -> None:
        """Let it take work from there. Only for an instance that is free."""
        self._inbox.put(source)

    @property
    def lost(self) -> bool:
        """Its runtime has ended by itself: it takes no more work."""
        return self.process is not None and self.process.lost

    async def stop(self, abandoned: bool = False) -> None:
        """Return when its runtime is closed; what it executes it finishes first, unless that takes too long, or it is
        `abandoned`: nobody waits for it."""
        self._inbox.put(None)
        if not abandoned:
            if await self._ends_within(_CLOSE_SECONDS):
                return
            log.error("instance '%s' still executes after %g s", self.name, _CLOSE_SECONDS)
        self.interrupt("the model was unloaded")
        if not await self._ends_within(_END_SECONDS):
            log.error("instance '%s' cannot be ended: its thread is left to itself", self.name)

    async def _ends_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._ended.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def interrupt(self, reason: str) -> bool:
        """Have what it executes fail, for that reason; from any thread. False: nothing could end it."""
        if self._end is not None:
            self._end(reason)
        return self._end is not None

    def _live(self) -> None:
        try:
            runtime = self._load()
        except BaseException as error:
            self._say(_fail, self._loaded, error)
        else:
            self._say(_resolve, self._loaded, runtime)
            self._work()
            self._close(runtime)
        self._say(self._ended.set)

    def _work(self) -> None:
        while (source := self._inbox.get()) is not None:
            while (work := source.next_batch(self)) is not None:
                self.current_batch = work
                self.execution_timer.start()
                source.execute_batch(self, work)
                self.execution_timer.stop()
                work = self.current_batch = None  # nothing of a batch outlives it here

    def _close(self, runtime: Runtime) -> None:
        try:
            runtime.close()
        except BaseException:
            log.exception("instance '%s' did not close", self.name)

    def _say(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            log.debug("instance '%s' outlived its event loop", self.name)


def _resolve(future: "asyncio.Future[Runtime]", runtime: Runtime) -> None:
    if not future.done():
        future.set_result(runtime)


def _fail(future: "asyncio.Future[Runtime]", error: BaseException) -> None:
    # A future refuses StopIteration, and a loop what means to end the process.
    cause = error if isinstance(error, Exception) and not isinstance(error, StopIteration) else None
    if not future.done():
        future.set_exception(cause or RuntimeError(f"{type(error).__name__}: {error}"))
