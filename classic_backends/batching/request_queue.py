"""Who waits for an instance: priority levels, first come first served in each, with deadlines.

Pure bookkeeping over the times it is told (nanoseconds); one caller at a time. Knows nothing of batches.
"""

from bisect import insort
from collections import OrderedDict
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain, count
from typing import Generic, TypeVar

from .batching_config import BatchingConfig

T = TypeVar("T")

_SPARE = 64
"""Deadlines of requests that left which are kept before they are swept up."""


@dataclass(slots=True, eq=False)
class QueuedRequest(Generic[T]):
    """A request in the queue, `item` to whom it belongs. `size`: its batch, at least 1; only requests of the same
    `kind` share a batch. `priority` and `timeout` as asked for, 0 for neither. `arrived` is set by the queue, as all
    below it; `deadline`: of its wait, `limit`: of its answer."""

    item: T
    batch_size: int = 1
    batch_key: Hashable = None
    priority: int = 0
    timeout_ns: int = 0
    arrived_at: int = 0
    level: int = 0
    queue_deadline: int | None = None
    answer_deadline: int | None = None
    queued: bool = False


@dataclass(slots=True)
class _Level(Generic[T]):
    """Requests in time, and those set aside because their time ran out."""

    on_time: "OrderedDict[QueuedRequest[T], None]" = field(default_factory=OrderedDict)
    postponed: "OrderedDict[QueuedRequest[T], None]" = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self.on_time) + len(self.postponed)


class RequestQueue(Generic[T]):
    """`size`: the batches of all who wait, added up. A level is there while somebody waits in it, the default level
    always: a config may have as many as a 64-bit number says."""

    def __init__(self, rules: BatchingConfig) -> None:
        self._rules = rules
        self._levels = {rules.default_level: _Level[T]()}
        self._order = [rules.default_level]
        self._deadlines: list[tuple[int, int, QueuedRequest[T]]] = []
        self._serial = count()
        self._dated = 0
        self.total_batch_size = 0

    def __len__(self) -> int:
        return sum(len(level) for level in self._levels.values())

    def __iter__(self) -> Iterator[QueuedRequest[T]]:
        """In the order in which they are served; not to be changed meanwhile."""
        for number in self._order:
            level = self._levels[number]
            yield from level.on_time
            yield from level.postponed

    def add(self, request: QueuedRequest[T], now: int) -> bool:
        """False: its level is full, and nothing has changed."""
        number = self._rules.level_of(request.priority)
        policy, level = self._rules.policy_of(number), self._levels.get(number)
        if level is None:
            level = self._levels[number] = _Level()
            insort(self._order, number)
        if policy.max_size and len(level) >= policy.max_size:
            return False
        request.level, request.arrived_at, request.queued = number, now, True
        request.queue_deadline, request.answer_deadline = (
            policy.queue_deadline(now, request.timeout_ns),
            policy.answer_deadline(now, request.timeout_ns),
        )
        level.on_time[request] = None
        self.total_batch_size += request.batch_size
        if request.queue_deadline is not None:
            heappush(self._deadlines, (request.queue_deadline, next(self._serial), request))
            self._dated += 1
        return True

    def remove(self, request: QueuedRequest[T]) -> bool:
        """It is served, or has given up. False: it was not here."""
        if not request.queued:
            return False
        level = self._levels[request.level]
        if request in level.on_time:
            del level.on_time[request]
            self._dated -= request.queue_deadline is not None
        else:
            del level.postponed[request]
        if not level and request.level != self._rules.default_level:
            del self._levels[request.level]
            self._order.remove(request.level)
        request.queued = False
        self.total_batch_size -= request.batch_size
        self._sweep()
        return True

    def expire(self, now: int) -> list[QueuedRequest[T]]:
        """Those whose time ran out and who are refused, already removed; where the policy says so they stay, behind the
        others of their level."""
        refused: list[QueuedRequest[T]] = []
        while (due := self.next_deadline) is not None and due <= now:
            request = heappop(self._deadlines)[2]
            if self._rules.policy_of(request.level).postpone:
                level = self._levels[request.level]
                del level.on_time[request]
                level.postponed[request] = None
                self._dated -= 1
            else:
                self.remove(request)
                refused.append(request)
        return refused

    @property
    def next_deadline(self) -> int | None:
        """When the next request has waited too long; None: nobody has a deadline."""
        while self._deadlines and not self._in_time(self._deadlines[0][2]):
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _in_time(self, request: QueuedRequest[T]) -> bool:
        return request.queued and request in self._levels[request.level].on_time

    def _sweep(self) -> None:
        """Who left must not be kept until his deadline."""
        if len(self._deadlines) > 2 * self._dated + _SPARE:
            self._deadlines = [entry for entry in self._deadlines if self._in_time(entry[2])]
            heapify(self._deadlines)

    def check_integrity(self) -> None:
        """Recompute everything. Raises `AssertionError`."""
        waiting = list(self)
        assert len(set(waiting)) == len(waiting) == len(self)
        assert self.total_batch_size == sum(request.batch_size for request in waiting)
        assert self._order == sorted(self._levels)
        for number, level in self._levels.items():
            assert level or number == self._rules.default_level
            members = chain(level.on_time, level.postponed)
            assert all(request.queued and request.level == number for request in members)
            assert all(request.queue_deadline is not None for request in level.postponed)
        dated = {request for request in waiting if request.queue_deadline is not None and self._in_time(request)}
        assert self._dated == len(dated)
        assert dated <= {entry[2] for entry in self._deadlines}
        assert len(self._deadlines) <= 2 * self._dated + _SPARE + 1
