"""One instance of a model: a thread that loads a runtime, executes batches with it, and closes it.

An instance takes batches from a `WorkSource` until there is none, then sleeps until it is woken. Knows nothing of
queues.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from statistics import median
from time import monotonic_ns
from typing import Protocol

from ...core.runtime import InstancePlacement, Runtime, RuntimeProcess
from ...core.wait_graph import InstanceWaits
from ...processes.child_process import RestartBackoff
from ...processes.rate_limiter import InstanceClaim
from .queued_request import RequestBatch, endless_requests

log = logging.getLogger(__name__)

_CLOSE_SECONDS = 30.0
"""The time that an unloaded instance has for its current batch before that is interrupted."""

_INTERRUPT_SECONDS = 5.0
"""The time that an interrupted instance has before its thread is left to itself."""

_NS_PER_SECOND = 1_000_000_000
_OVERDUE_AFTER_NS = 30 * _NS_PER_SECOND
_OVERDUE_MEDIANS = 20
_MEDIAN_OF = 64


class ExecutionTimer:
    """How long the executions of an instance take; its thread starts and stops it, the event loop reads it. An
    execution is overdue after 30 s and 20 times the median of the last 64; each response of a decoupled model counts as
    an execution. `clock`: nanoseconds."""

    def __init__(self, clock: Callable[[], int] = monotonic_ns) -> None:
        self._clock = clock
        self._started_at: int | None = None
        self._durations: deque[int] = deque(maxlen=_MEDIAN_OF)
        self._lock = threading.Lock()

    def start(self) -> None:
        self._started_at = self._clock()

    def stop(self) -> None:
        """End the current execution, if there is one."""
        with self._lock:
            if self._started_at is not None:
                self._durations.append(self._clock() - self._started_at)
                self._started_at = None

    @property
    def running_seconds(self) -> float:
        """The age of the current execution; 0 without one."""
        return self._running_ns() / _NS_PER_SECOND

    @property
    def overdue(self) -> bool:
        running = self._running_ns()
        if running <= _OVERDUE_AFTER_NS:
            return False
        return running > _OVERDUE_MEDIANS * (median(self._durations) if self._durations else 0)

    def call_if_longer_than(self, seconds: float, call: Callable[[], None]) -> bool:
        """Call if the current execution is older, which cannot end meanwhile. Whether it is."""
        with self._lock:
            longer = self._running_ns() > seconds * _NS_PER_SECOND
            if longer:
                call()
        return longer

    def _running_ns(self) -> int:
        started_at = self._started_at
        return 0 if started_at is None else self._clock() - started_at


class WorkSource(Protocol):
    """Gives batches to instances, in their threads."""

    def execute_batch(self, instance: "Instance", batch: RequestBatch) -> None:
        """Never raises."""

    def next_batch(self, instance: "Instance") -> RequestBatch | None:
        """The next batch of this instance; None: it is free from now on, and will be woken."""


class Instance:
    """One instance of a model; its name is its thread's and stands in messages. `claim`: its turns, where resources are
    limited."""

    def __init__(
        self,
        placement: InstancePlacement,
        load: Callable[[InstancePlacement], Runtime],
        backoff: RestartBackoff,
        claim: InstanceClaim | None = None,
    ) -> None:
        self.placement = placement
        self.name = placement.name
        self.runtime: Runtime
        self.process: RuntimeProcess | None = None
        """The runtime's, if it has one of its own."""
        self.execution_timer = ExecutionTimer()
        self.current_batch: RequestBatch | None = None
        """Read by the event loop."""
        self.backoff = backoff
        """Kept for its pool, as all fields below; it outlives the instance."""
        self.started_at = time.monotonic()
        self.overdue_logged = False
        """The log has that its execution is overdue."""
        self.timed_out = False
        """Its execution was interrupted, or cannot be."""
        self.unready_reason = ""
        """What its model's own check said last."""
        self.has_served = False
        """It has executed a batch without losing its process."""
        self._load = load
        self._claim = claim
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[Runtime] = self._loop.create_future()
        self._ended = asyncio.Event()
        self._inbox: SimpleQueue[WorkSource | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._interrupt: Callable[[str], None] | None = None

    async def start(self) -> None:
        """Return when the runtime is loaded; raises the error of its load. If this is cancelled, the thread ends when
        the load does."""
        self._thread.start()
        try:
            self.runtime = await asyncio.shield(self._loaded)
        except BaseException:
            self._inbox.put(None)
            self._close_claim()
            raise
        self.process = self.runtime.traits.process
        self._interrupt = self.runtime.traits.interrupt

    def wake(self, source: WorkSource) -> None:
        """Let a free instance take batches from `source`."""
        self._inbox.put(source)

    @property
    def lost(self) -> bool:
        """Whether its runtime's process has ended by itself: it takes no more batches."""
        return self.process is not None and self.process.lost

    @property
    def abandoned(self) -> bool:
        """Whether no reader waits any more for what it executes."""
        batch = self.current_batch
        return batch is not None and all(request.given_up for request in batch.requests)

    def waits(self) -> InstanceWaits:
        """The requests that it executes, and the calls that these wait for."""
        batch = self.current_batch
        executing = [] if batch is None else endless_requests(batch.requests)
        return InstanceWaits(self.name, executing, () if self.lost else self.runtime.awaited_calls())

    async def stop(self, abandoned: bool = False) -> None:
        """Return when the runtime is closed. The current batch is finished first, unless that takes too long or it is
        `abandoned`."""
        self._inbox.put(None)
        if self.current_batch is None:
            self._close_claim()  # it may wait for its turn
        if not (abandoned or await is_set_within(self._ended, _CLOSE_SECONDS)):
            log.error("instance '%s' still executes after %g s", self.name, _CLOSE_SECONDS)
        if not self._ended.is_set():
            self.interrupt("the model was unloaded")
            if not await is_set_within(self._ended, _INTERRUPT_SECONDS):
                log.error("instance '%s' cannot be ended: its thread is left to itself", self.name)
        self._close_claim()

    def _close_claim(self) -> None:
        if self._claim is not None:
            self._claim.close()

    def interrupt(self, reason: str) -> bool:
        """Make the current execution fail for that reason; from any thread. False: the runtime cannot be
        interrupted."""
        if self._interrupt is not None:
            self._interrupt(reason)
        return self._interrupt is not None

    def _run(self) -> None:
        try:
            runtime = self._load(self.placement)
        except BaseException as error:
            call_in_loop(self._loop, self._set_loaded, None, error)
        else:
            call_in_loop(self._loop, self._set_loaded, runtime)
            while (source := self._inbox.get()) is not None:
                if self._claim is None:
                    while self._execute_next(source):
                        pass
                else:
                    self._take_turns(source, self._claim)
            try:
                runtime.close()
            except BaseException:
                log.exception("instance '%s' did not close", self.name)
        call_in_loop(self._loop, self._ended.set)

    def _execute_next(self, source: WorkSource) -> bool:
        """Whether there was a batch."""
        batch = source.next_batch(self)
        if batch is None:
            return False
        self.current_batch = batch
        self.execution_timer.start()
        source.execute_batch(self, batch)
        self.execution_timer.stop()
        self.has_served = self.has_served or not self.lost
        self.current_batch = None
        return True

    def _take_turns(self, source: WorkSource, claim: InstanceClaim) -> None:
        """Wait for the resources before each batch: requests that come meanwhile join it."""
        while claim.acquire() and self._execute_next(source):
            pass
        claim.release()

    def _set_loaded(self, runtime: Runtime | None, error: BaseException | None = None) -> None:
        if self._loaded.done():
            return
        if runtime is not None:
            self._loaded.set_result(runtime)
        elif isinstance(error, Exception) and not isinstance(error, StopIteration):
            self._loaded.set_exception(error)
        else:  # a future refuses StopIteration, and an event loop ends at BaseExceptions
            self._loaded.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))


def call_in_loop(loop: asyncio.AbstractEventLoop, call: Callable[..., None], *arguments: object) -> None:
    """Call in the event loop's thread; nothing happens where that is closed, and every reader with it."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(call, *arguments)


async def is_set_within(event: asyncio.Event, seconds: float) -> bool:
    with suppress(TimeoutError):
        await asyncio.wait_for(event.wait(), seconds)
    return event.is_set()
