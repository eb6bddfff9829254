"""The instances of a model: loaded together, stopped together, and replaced when they are lost.

The pool watches for executions that take too long, and for runtimes whose process ends by itself.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from math import inf
from typing import Protocol

from ...core.runtime import InstancePlacement, Runtime
from ...core.tasks import wait_for_first
from ...processes.child_process import RestartBackoff
from ...processes.rate_limiter import RateLimiter
from .instance import Instance, is_set_within

log = logging.getLogger(__name__)

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
    """Learns which instances can take work."""

    def add_instance(self, instance: Instance) -> None: ...

    def remove_instance(self, instance: Instance) -> None: ...


class InstancePool:
    """All instances of one model. `load` makes the runtime of a placement, in its instance's thread.
    `execution_timeout`: seconds after which an execution is interrupted, 0 for never. `restart_pause`: seconds before a
    lost one is replaced; doubled with each loss of one that served nothing. `limiter`: whose resources instances take
    turns at, where they are limited."""

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
        """Replacements of lost instances."""

    @property
    def first_runtime(self) -> Runtime:
        return self._instances[0].runtime

    @property
    def count(self) -> int:
        """Instances that take requests."""
        return sum(not instance.placement.passive for instance in self._instances)

    @property
    def replacing(self) -> bool:
        """Whether an instance is to come in place of a lost one."""
        return bool(self._replacing)

    async def are_replaced_within(self, seconds: float) -> bool:
        """Whether others have come in place of lost instances after so many seconds; not where none is to come."""
        if not self._replacing:
            return False
        latest = time.monotonic() + seconds
        # One that has come may be lost again before this goes on.
        while self._replacing and (left := latest - time.monotonic()) > 0:
            await asyncio.wait(self._replacing, timeout=left)
        return not self._replacing

    @property
    def ready(self) -> bool:
        """Whether an instance takes requests, and its execution is not overdue."""
        active = (instance for instance in self._instances if not instance.placement.passive)
        return any(not instance.lost and not instance.execution_timer.overdue for instance in active)

    async def check_ready(self) -> bool:
        """Whether all instances whose models check themselves are ready. A change is logged, with the reason."""
        checks = {
            instance: instance.runtime.traits.unready_reason()
            for instance in self._instances
            if not instance.lost and instance.runtime.traits.unready_reason is not None
        }
        reasons = await asyncio.gather(*checks.values())
        for instance, reason in zip(checks, reasons, strict=True):
            if reason != instance.unready_reason:
                log.warning("instance '%s' is %s", instance.name, f"not ready: {reason}" if reason else "ready again")
            instance.unready_reason = reason
        return not any(reasons)

    async def load_instances(self, placements: Sequence[InstancePlacement]) -> None:
        """Return when all of them are loaded; raises the error of one that is not."""
        pauses = (self._restart_pause, max(self._restart_pause, _LONGEST_RESTART_PAUSE), _STABLE_SECONDS)
        instances = [self._instance(placement, RestartBackoff(*pauses)) for placement in placements]
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
        instances = self._instances
        self._instances = []
        await asyncio.gather(*(instance.stop(instance.abandoned) for instance in instances))

    def _check_executions(self) -> None:
        interval = CHECK_INTERVAL
        if self._execution_timeout:
            interval = min(interval, max(self._execution_timeout / 4, _MIN_CHECK_INTERVAL))
        self._check_timer = asyncio.get_running_loop().call_later(interval, self._check_executions)
        for instance in self._instances:
            timer = instance.execution_timer
            overdue = timer.overdue
            if overdue and not instance.overdue_logged:
                seconds = timer.running_seconds
                log.error("instance '%s' has been executing for %g s: it is not ready", instance.name, seconds)
            elif instance.overdue_logged and not overdue:
                log.warning("instance '%s' is ready again", instance.name)
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
        worked_seconds = inf if lost.has_served else time.monotonic() - lost.started_at
        retry_after = lost.backoff.next_delay(worked_seconds)
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
