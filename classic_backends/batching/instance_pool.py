"""The instances of a model: threads that load a runtime each, execute batches with it, and close it; loaded together,
stopped together, and replaced when they are lost.

An instance takes batches from a `WorkSource` until there is none, then sleeps until it is woken. The pool watches for
executions that take too long, and for runtimes whose process ends by itself. Knows nothing of queues.
"""

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from math import inf
from queue import SimpleQueue
from statistics import median
from time import monotonic_ns
from typing import Protocol

from ...core.runtime import InstancePlacement, Runtime, RuntimeProcess
from ...core.tasks import wait_for_first
from ...core.wait_graph import InstanceWaits
from ...processes.child_process import RestartBackoff
from ...processes.rate_limiter import InstanceClaim, RateLimiter
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
    """One instance of a model; its name is its thread's and stands in messages. `process`: the runtime's, if it has
    one of its own. `current_batch` is read by the event loop. For its pool, `backoff` outlives it; `started_at`: of
    `time.monotonic`; `overdue_logged`: the log has that its execution is overdue; `timed_out`: its execution was
    interrupted, or cannot be; `unready_reason`: what its model's own check said last; `has_served`: it has executed a
    batch without losing its process. `claim`: its turns, where resources are limited."""

    def __init__(
        self,
        placement: InstancePlacement,
        load: Callable[[InstancePlacement], Runtime],
        backoff: RestartBackoff,
        claim: InstanceClaim | None = None,
    ) -> None:
        self.placement = placement
        self.name = placement.name
        self.backoff = backoff
        self.started_at = time.monotonic()
        self.overdue_logged = self.timed_out = self.has_served = False
        self.unready_reason = ""
        self.runtime: Runtime
        self.process: RuntimeProcess | None = None
        self.execution_timer = ExecutionTimer()
        self.current_batch: RequestBatch | None = None
        self._load = load
        self._claim = claim
        self._loop = asyncio.get_running_loop()
        self._loaded: asyncio.Future[Runtime] = self._loop.create_future()
        self._ended = asyncio.Event()
        self._inbox: SimpleQueue[WorkSource | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=self.name, daemon=True)
        self._interrupt: Callable[[str], None] | None = None

    async def start(self) -> None:
        """Return when the runtime is loaded; raises the error of its load."""
        self._thread.start()
        try:
            self.runtime = await asyncio.shield(self._loaded)
        except BaseException:
            self._close_claim()
            raise
        self.process, self._interrupt = self.runtime.traits.process, self.runtime.traits.interrupt

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
        """What it executes, and what that waits for."""
        batch, awaited = self.current_batch, () if self.lost else self.runtime.awaited_calls()
        return InstanceWaits(self.name, [] if batch is None else endless_requests(batch.requests), awaited)

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


EXECUTION_TIMEOUT = "execution_timeout_secs"
"""The parameter of a model or backend with the seconds after which an execution is interrupted."""

RESTART_PAUSE = "restart_pause_secs"
"""The parameter of a model or backend with the seconds before a lost instance is replaced."""

DEFAULT_RESTART_PAUSE = 0.1

_LONGEST_RESTART_PAUSE = 30.0
_STABLE_SECONDS = 10.0
"""An instance that has lived as long, or served a batch, is replaced after the first pause again."""

_LEAST_RETRY_PAUSE = 0.1
"""Seconds before an instance that could not be loaded is loaded once more, where a lost one has a shorter pause."""

CHECK_INTERVAL = 1.0
"""Seconds between two looks at executions."""

_MIN_CHECK_INTERVAL = 0.05


class InstanceListener(Protocol):
    """Is told which instances can take work."""

    def add_instance(self, instance: Instance) -> None: ...

    def remove_instance(self, instance: Instance) -> None: ...


class InstancePool:
    """`load` makes the runtime of a placement, in its instance's thread. `execution_timeout`: seconds after which an
    execution is interrupted, 0 for never. `restart_pause`: seconds before a lost one is replaced; doubled with each
    loss of one that served nothing. `limiter`: whose resources instances take turns at, where they are limited.
    `restarts`: replacements of lost instances."""

    def __init__(
        self,
        load: Callable[[InstancePlacement], Runtime],
        execution_timeout: float = 0.0,
        restart_pause: float = DEFAULT_RESTART_PAUSE,
        limiter: RateLimiter | None = None,
    ) -> None:
        self._load = load
        self._limiter = limiter
        self._execution_timeout = execution_timeout
        self._restart_pause = restart_pause
        self._check_timer: asyncio.TimerHandle | None = None
        self._instances: list[Instance] = []
        self._listener: InstanceListener | None = None
        self._replacing: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self.restarts = 0

    @property
    def first(self) -> Runtime:
        return self._instances[0].runtime

    @property
    def count(self) -> int:
        """Instances that take requests."""
        return sum(not instance.placement.passive for instance in self._instances)

    @property
    def replacing(self) -> bool:
        """Whether an instance is to come in place of a lost one."""
        return bool(self._replacing)

    @property
    def ready(self) -> bool:
        """Whether an instance takes requests, and its execution is not overdue."""
        active = (instance for instance in self._instances if not instance.placement.passive)
        return any(not instance.lost and not instance.execution_timer.overdue for instance in active)

    async def check_ready(self) -> bool:
        """Whether all instances whose models check themselves are ready. A change is logged, with the reason."""
        asked = {each: each.runtime.traits.unready_reason for each in self._instances if not each.lost}
        checks = {instance: check() for instance, check in asked.items() if check is not None}
        reasons = await asyncio.gather(*checks.values())
        for instance, reason in zip(checks, reasons, strict=True):
            if reason != instance.unready_reason:
                log.warning("instance '%s' is %s", instance.name, f"not ready: {reason}" if reason else "ready again")
            instance.unready_reason = reason
        return not any(reasons)

    async def load_instances(self, placements: Sequence[InstancePlacement]) -> None:
        """Return when all of them are loaded; raises the error of one that is not."""
        pauses = (self._restart_pause, max(self._restart_pause, _LONGEST_RESTART_PAUSE), _STABLE_SECONDS)
        instances = [self._instance(each, RestartBackoff(*pauses)) for each in placements]
        results = await asyncio.gather(*(instance.start() for instance in instances), return_exceptions=True)
        self._instances += [instance for instance, result in zip(instances, results, strict=True) if result is None]
        for result in results:
            if result is not None:
                raise result

    def _instance(self, placement: InstancePlacement, backoff: RestartBackoff) -> Instance:
        """Raises `InvalidArgument` if it asks for more of a resource than there is."""
        if self._limiter is None or placement.rate is None:
            return Instance(placement, self._load, backoff)
        return Instance(placement, self._load, backoff, self._limiter.claim(placement.rate))

    def start_serving(self, listener: InstanceListener) -> None:
        """Give the instances to `listener`, and all that replace them."""
        self._listener = listener
        for instance in self._instances:
            self._enlist(instance)
        self._check_executions()

    async def stop(self) -> None:
        """Return when all instances are closed."""
        self._stopping.set()
        if self._check_timer is not None:
            self._check_timer.cancel()
        for instance in self._instances:
            _stop_watching(instance)
        await asyncio.gather(*self._replacing)
        instances, self._instances = self._instances, []
        await asyncio.gather(*(instance.stop(instance.abandoned) for instance in instances))

    def _check_executions(self) -> None:
        interval = CHECK_INTERVAL
        if self._execution_timeout:
            interval = min(interval, max(self._execution_timeout / 4, _MIN_CHECK_INTERVAL))
        self._check_timer = asyncio.get_running_loop().call_later(interval, self._check_executions)
        for instance in self._instances:
            name, timer = instance.name, instance.execution_timer
            overdue = timer.overdue
            if overdue and not instance.overdue_logged:
                log.error("instance '%s' has been executing for %g s: it is not ready", name, timer.running_seconds)
            elif instance.overdue_logged and not overdue:
                log.warning("instance '%s' is ready again", name)
            instance.overdue_logged = overdue
            if self._execution_timeout:
                time_out = partial(self._time_out, instance)
                instance.timed_out = timer.call_if_longer_than(self._execution_timeout, time_out)

    def _time_out(self, instance: Instance) -> None:
        if instance.timed_out:
            return
        reason = f"the execution took longer than {self._execution_timeout:g} s ({EXECUTION_TIMEOUT})"
        effect = "it is ended" if instance.interrupt(reason) else "a thread cannot be ended"
        log.error("instance '%s': %s; %s", instance.name, reason, effect)

    def _enlist(self, instance: Instance) -> None:
        if instance.process is not None:
            asyncio.get_running_loop().add_reader(instance.process.sentinel, self._on_lost, instance)
        if self._listener is not None and not instance.placement.passive:
            self._listener.add_instance(instance)

    def _on_lost(self, instance: Instance) -> None:
        _stop_watching(instance)
        self._instances.remove(instance)
        if self._listener is not None:
            self._listener.remove_instance(instance)
        task = asyncio.create_task(self._replace(instance), name=f"replace {instance.name}")
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace(self, lost: Instance) -> None:
        """Load another instance, however often that takes."""
        worked = inf if lost.has_served else time.monotonic() - lost.started_at
        retry_after = lost.backoff.next_delay(worked)
        log.error("instance '%s' has ended unexpectedly; another one starts in %g s", lost.name, retry_after)
        await lost.stop()
        while not await is_set_within(self._stopping, retry_after):
            instance = self._instance(lost.placement, lost.backoff)
            try:
                await wait_for_first(instance.start(), self._stopping.wait())
            except Exception as error:
                log.error("instance '%s' did not start again: %s", lost.name, error)
                retry_after = max(lost.backoff.next_delay(), _LEAST_RETRY_PAUSE)
                continue
            if self._stopping.is_set():
                await instance.stop(abandoned=True)  # it may still load
                return
            self.restarts += 1
            self._instances.append(instance)
            log.warning("instance '%s' works again", lost.name)
            self._enlist(instance)
            return


def _stop_watching(instance: Instance) -> None:
    if instance.process is not None:
        asyncio.get_running_loop().remove_reader(instance.process.sentinel)
