"""The instances of a model: loaded together, stopped together, and replaced when they are lost.

Watches for executions that take too long, and for runtimes whose process ends by itself. Knows nothing of requests: an
`InstanceListener` gives the instances their work.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from ...core.cancellation import wait_for_first
from ...processes.child_process import RestartBackoff
from ..instance_groups import InstanceSlot
from ..runtime import Runtime
from .instance import Instance

log = logging.getLogger(__name__)

EXECUTION_TIMEOUT = "execution_timeout_secs"
"""The parameter of a model or backend with the seconds after which an execution is interrupted."""

_MIN_CHECK_INTERVAL = 0.05


class RestartPolicy(NamedTuple):
    """Seconds. A lost instance is replaced after `first_retry`, then twice as long each time up to `last_retry`, until
    one has lived for `stable_after`. Executions are checked each `check_interval`."""

    first_retry: float = 0.1
    last_retry: float = 30.0
    stable_after: float = 5.0
    check_interval: float = 1.0


RESTART_POLICY = RestartPolicy()


class InstanceListener(Protocol):
    """Is told which instances can take work."""

    def add_instance(self, instance: Instance) -> None: ...

    def remove_instance(self, instance: Instance) -> None: ...


@dataclass(eq=False, slots=True)
class _PooledInstance:
    """`backoff`: of its slot; `started_at`: of `time.monotonic`; `overdue_logged`: the log has that its execution is
    overdue; `timed_out`: its execution was interrupted, or cannot be."""

    slot: InstanceSlot
    instance: Instance
    backoff: RestartBackoff
    started_at: float = field(default_factory=time.monotonic)
    overdue_logged: bool = False
    timed_out: bool = False


class InstancePool:
    """`load` makes the runtime of a slot, in its instance's thread. `execution_timeout`: seconds after which an
    execution is interrupted, 0 for never. `restarts`: replacements of lost instances."""

    def __init__(self, load: Callable[[InstanceSlot], Runtime], execution_timeout: float = 0.0) -> None:
        self._load = load
        self._execution_timeout = execution_timeout
        self._policy = RESTART_POLICY
        self._check_timer: asyncio.TimerHandle | None = None
        self._members: list[_PooledInstance] = []
        self._listener: InstanceListener | None = None
        self._replacing: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self.restarts = 0

    @property
    def first(self) -> Runtime:
        return self._members[0].instance.runtime

    @property
    def ready(self) -> bool:
        """Whether an instance takes requests, and its execution is not overdue."""
        active = (member.instance for member in self._members if not member.slot.passive)
        return any(not instance.lost and not instance.execution_timer.overdue for instance in active)

    async def load_instances(self, slots: Sequence[InstanceSlot]) -> None:
        """Return when all of them are loaded; raises the error of one that is not."""
        members = [
            _PooledInstance(slot, self._make_instance(slot), RestartBackoff(*self._policy[:3])) for slot in slots
        ]
        results = await asyncio.gather(*(each.instance.start() for each in members), return_exceptions=True)
        self._members += [member for member, result in zip(members, results, strict=True) if result is None]
        for result in results:
            if result is not None:
                raise result

    def start_serving(self, listener: InstanceListener) -> None:
        """Give the instances to `listener`, and all that replace them."""
        self._listener = listener
        for member in self._members:
            self._enlist(member)
        self._check_executions()

    async def stop(self) -> None:
        """Return when all instances are closed."""
        self._stopping.set()
        if self._check_timer is not None:
            self._check_timer.cancel()
        for member in self._members:
            _stop_watching(member.instance)
        await asyncio.gather(*self._replacing)
        instances = [member.instance for member in self._members]
        self._members = []
        await asyncio.gather(*(instance.stop(_is_abandoned(instance)) for instance in instances))

    def _check_executions(self) -> None:
        interval = self._policy.check_interval
        if self._execution_timeout:
            interval = min(interval, max(self._execution_timeout / 4, _MIN_CHECK_INTERVAL))
        self._check_timer = asyncio.get_running_loop().call_later(interval, self._check_executions)
        for member in self._members:
            name, timer = member.instance.name, member.instance.execution_timer
            overdue = timer.overdue
            if overdue and not member.overdue_logged:
                log.error("instance '%s' has been executing for %g s: it is not ready", name, timer.running_seconds)
            elif member.overdue_logged and not overdue:
                log.warning("instance '%s' is ready again", name)
            member.overdue_logged = overdue
            if self._execution_timeout:
                member.timed_out = timer.call_if_longer_than(self._execution_timeout, partial(self._time_out, member))

    def _time_out(self, member: _PooledInstance) -> None:
        if member.timed_out:
            return
        reason = f"the execution took longer than {self._execution_timeout:g} s ({EXECUTION_TIMEOUT})"
        effect = "it is ended" if member.instance.interrupt(reason) else "a thread cannot be ended"
        log.error("instance '%s': %s; %s", member.instance.name, reason, effect)

    def _make_instance(self, slot: InstanceSlot) -> Instance:
        return Instance(slot.placement.name, partial(self._load, slot))

    def _enlist(self, member: _PooledInstance) -> None:
        if member.instance.process is not None:
            sentinel = member.instance.process.sentinel
            asyncio.get_running_loop().add_reader(sentinel, self._on_lost, member)
        if self._listener is not None and not member.slot.passive:
            self._listener.add_instance(member.instance)

    def _on_lost(self, member: _PooledInstance) -> None:
        _stop_watching(member.instance)
        self._members.remove(member)
        if self._listener is not None:
            self._listener.remove_instance(member.instance)
        retry_after = member.backoff.next_delay(time.monotonic() - member.started_at)
        task = asyncio.create_task(self._replace(member, retry_after), name=f"replace {member.instance.name}")
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace(self, lost: _PooledInstance, retry_after: float) -> None:
        """Load another instance, however often that takes."""
        name = lost.instance.name
        log.error("instance '%s' has ended unexpectedly; another one starts in %g s", name, retry_after)
        await lost.instance.stop()
        while not await self._stops_within(retry_after):
            member = _PooledInstance(lost.slot, self._make_instance(lost.slot), lost.backoff)
            try:
                await wait_for_first(member.instance.start(), self._stopping.wait())
            except Exception as error:
                log.error("instance '%s' did not start again: %s", name, error)
                retry_after = lost.backoff.next_delay()
                continue
            if self._stopping.is_set():
                await member.instance.stop(abandoned=True)  # it may still load
                return
            self.restarts += 1
            self._members.append(member)
            log.warning("instance '%s' works again", name)
            self._enlist(member)
            return

    async def _stops_within(self, seconds: float) -> bool:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._stopping.wait(), seconds)
        return self._stopping.is_set()


def _is_abandoned(instance: Instance) -> bool:
    """Whether no reader waits any more for what the instance executes."""
    batch = instance.current_batch
    return batch is not None and all(request.given_up for request in batch.requests)


def _stop_watching(instance: Instance) -> None:
    if instance.process is not None:
        asyncio.get_running_loop().remove_reader(instance.process.sentinel)
