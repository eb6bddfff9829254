"""The instances of a model: started together, stopped together, and replaced when they are lost.

An instance that can end by itself, as a process does, is watched. Knows nothing of requests: whoever gives the
instances work is told who comes and who goes.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple, Protocol

from ..instance_groups import InstanceSlot
from ..runtime import Runtime
from .dispatcher import JobInstance
from .instance import Instance

log = logging.getLogger(__name__)


EXECUTION_TIMEOUT = "execution_timeout_secs"
"""The parameter of a model or backend that says after how many seconds an execution is ended."""

_SOONEST = 0.05
"""Seconds between two looks at how long executions take, at least."""


class RestartPolicy(NamedTuple):
    """Seconds. A lost instance is replaced after `first_retry`, then twice as long each time up to `last_retry`, until
    one has lived for `stable`. `watch`: how often to look how long executions take."""

    first_retry: float = 0.1
    last_retry: float = 30.0
    stable_after: float = 5.0
    check_interval: float = 1.0


RESTART_POLICY = RestartPolicy()


class InstanceListener(Protocol):
    """Hears who can work."""

    def add_instance(self, worker: JobInstance) -> None: ...

    def remove_instance(self, worker: JobInstance) -> None: ...


@dataclass(eq=False, slots=True)
class _PooledInstance:
    """One instance in the place that a config gives it. `born`: when it began to work, of `time.monotonic`. `late`: the
    log has it that its execution is overdue; `ended`: that it was ended, or cannot be."""

    slot: InstanceSlot
    instance: JobInstance
    started_at: float = field(default_factory=time.monotonic)
    overdue_logged: bool = False
    interrupted: bool = False


class InstancePool:
    """`load` makes the runtime of a slot, in its instance's thread. `limit`: seconds after which an execution is ended,
    where it can be; 0: never. `restarts`: replacements of lost ones."""

    def __init__(
        self, load: Callable[[InstanceSlot], Runtime], limit: float = 0.0, patience: RestartPolicy | None = None
    ) -> None:
        self._load = load
        self._limit = limit
        self._patience = patience or RESTART_POLICY
        self._watching: asyncio.TimerHandle | None = None
        self._members: list[_PooledInstance] = []
        self._roster: InstanceListener | None = None
        self._replacing: set[asyncio.Task[None]] = set()
        self._stopping = asyncio.Event()
        self.restarts = 0

    @property
    def first(self) -> Runtime:
        return self._members[0].instance.runtime

    @property
    def ready(self) -> bool:
        """An instance is there to work, and what it executes is not overdue."""
        active = (member.instance for member in self._members if not member.slot.passive)
        return any(not worker.lost and not worker.execution_timer.overdue for worker in active)

    async def load_instances(self, slots: Sequence[InstanceSlot]) -> None:
        """Return when all of them are loaded. Raises what loading one raises."""
        members = [_PooledInstance(slot, self._instance(slot)) for slot in slots]
        results = await asyncio.gather(*(each.instance.start() for each in members), return_exceptions=True)
        self._members += [member for member, result in zip(members, results, strict=True) if result is None]
        for result in results:
            if result is not None:
                raise result

    def start_serving(self, roster: InstanceListener) -> None:
        """Let them work, and whoever replaces them."""
        self._roster = roster
        for member in self._members:
            self._enlist(member)
        self._watch()

    async def stop(self) -> None:
        """Return when nothing of them is left."""
        self._stopping.set()
        if self._watching is not None:
            self._watching.cancel()
        for member in self._members:
            _unwatch(member.instance)
        await asyncio.gather(*self._replacing)
        members, self._members = self._members, []
        await asyncio.gather(*(member.instance.stop(_abandoned(member.instance)) for member in members))

    def _watch(self) -> None:
        every = (
            min(self._patience.check_interval, max(self._limit / 4, _SOONEST))
            if self._limit
            else self._patience.check_interval
        )
        self._watching = asyncio.get_running_loop().call_later(every, self._watch)
        for member in self._members:
            self._look(member)

    def _look(self, member: _PooledInstance) -> None:
        """Whether it executes something for too long."""
        worker, late = member.instance, member.instance.execution_timer.overdue
        if late and not member.overdue_logged:
            log.error(
                "instance '%s' has been executing for %g s: it is not ready",
                worker.name,
                worker.execution_timer.running_seconds,
            )
        elif member.overdue_logged and not late:
            log.warning("instance '%s' is ready again", worker.name)
        member.overdue_logged = late
        if self._limit:
            told = member.interrupted
            member.interrupted = worker.execution_timer.call_if_longer_than(
                self._limit, lambda: None if told else self._end(worker)
            )

    def _end(self, worker: JobInstance) -> None:
        reason = f"the execution took longer than {self._limit:g} s ({EXECUTION_TIMEOUT})"
        ends = worker.interrupt(reason)
        log.error("instance '%s': %s; %s", worker.name, reason, "it is ended" if ends else "a thread cannot be ended")

    def _instance(self, slot: InstanceSlot) -> JobInstance:
        return Instance(slot.placement.name, partial(self._load, slot))

    def _enlist(self, member: _PooledInstance, pause: float | None = None) -> None:
        """`pause`: before it is replaced, should it be lost soon."""
        if member.instance.process is not None:
            sentinel = member.instance.process.sentinel
            asyncio.get_running_loop().add_reader(sentinel, self._lost, member, pause or self._patience.first_retry)
        if self._roster is not None and not member.slot.passive:
            self._roster.add_instance(member.instance)

    def _lost(self, member: _PooledInstance, pause: float) -> None:
        _unwatch(member.instance)
        self._members.remove(member)
        if self._roster is not None:
            self._roster.remove_instance(member.instance)
        if time.monotonic() - member.started_at >= self._patience.stable_after:
            pause = self._patience.first_retry
        task = asyncio.create_task(self._replace(member, pause), name=f"replace {member.instance.name}")
        self._replacing.add(task)
        task.add_done_callback(self._replacing.discard)

    async def _replace(self, lost: _PooledInstance, pause: float) -> None:
        """Try it for ever."""
        log.error("instance '%s' has ended unexpectedly; another one starts in %g s", lost.instance.name, pause)
        await lost.instance.stop()
        while not await self._stops_within(pause):
            pause = min(2 * pause, self._patience.last_retry)
            member = _PooledInstance(lost.slot, self._instance(lost.slot))
            try:
                await self._unless_stopping(member.instance.start())
            except Exception as error:
                log.error("instance '%s' did not start again: %s", member.instance.name, error)
            else:
                await self._take(member, pause)
                break

    async def _take(self, member: _PooledInstance, pause: float) -> None:
        if self._stopping.is_set():
            await member.instance.stop(abandoned=True)  # it may still load
            return
        self.restarts += 1
        self._members.append(member)
        log.warning("instance '%s' works again", member.instance.name)
        self._enlist(member, pause)

    async def _unless_stopping(self, wait: Coroutine[None, None, None]) -> None:
        waits = [asyncio.ensure_future(each) for each in (wait, self._stopping.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if waits[0].done():
                waits[0].result()
        finally:
            for each in waits:
                each.cancel()

    async def _stops_within(self, seconds: float) -> bool:
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return False
        return True


def _abandoned(worker: JobInstance) -> bool:
    """Nobody waits any more for what it executes."""
    work = worker.current_batch
    return work is not None and all(request.item.given_up for request in work.requests)


def _unwatch(worker: JobInstance) -> None:
    if worker.process is not None:
        asyncio.get_running_loop().remove_reader(worker.process.sentinel)
