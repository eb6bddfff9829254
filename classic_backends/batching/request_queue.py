"""The queue of one model: priority levels, first come first served in each, with deadlines.

Pure bookkeeping over times (nanoseconds) that its caller gives; one caller at a time. Knows nothing of batches.
"""

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain, count

from .batching_config import BatchingConfig
from .queued_request import QueuedRequest

_STALE_DEADLINES = 64
"""Deadlines of requests that left which are kept before they are swept up."""


@dataclass(slots=True)
class _PriorityLevel:
    """Requests before their deadline, and those postponed because theirs has passed, each in order of arrival."""

    on_time: "OrderedDict[QueuedRequest, None]" = field(default_factory=OrderedDict)
    postponed: "OrderedDict[QueuedRequest, None]" = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self.on_time) + len(self.postponed)


class RequestQueue:
    """`total_batch_size`: the sum over all requests that wait. A level exists while a request waits in it (the default
    level always): a config may have as many as a 64-bit number says."""

    def __init__(self, config: BatchingConfig) -> None:
        self._config = config
        self._levels = {config.default_level: _PriorityLevel()}
        self._level_order = [config.default_level]
        self._deadlines: list[tuple[int, int, QueuedRequest]] = []
        self._serial = count()
        self._with_deadline = 0
        self.total_batch_size = 0

    def __len__(self) -> int:
        return sum(len(level) for level in self._levels.values())

    def __iter__(self) -> Iterator[QueuedRequest]:
        """The requests in the order in which they are served; the queue must not change meanwhile."""
        for number in self._level_order:
            level = self._levels[number]
            yield from level.on_time
            yield from level.postponed

    def add(self, request: QueuedRequest, now: int) -> bool:
        """Queue a request. False: its level is full, and nothing has changed."""
        number = self._config.level_of(request.priority)
        policy, level = self._config.policy_of(number), self._levels.get(number)
        if level is None:
            level = self._levels[number] = _PriorityLevel()
            insort(self._level_order, number)
        if policy.max_size and len(level) >= policy.max_size:
            return False
        request.level, request.queued_at, request.queued = number, now, True
        request.arrived_at = request.arrived_at or now
        request.queue_deadline = policy.queue_deadline(now, request.timeout_ns)
        request.answer_deadline = policy.answer_deadline(now, request.timeout_ns)
        level.on_time[request] = None
        self.total_batch_size += request.batch_size
        if request.queue_deadline is not None:
            heappush(self._deadlines, (request.queue_deadline, next(self._serial), request))
            self._with_deadline += 1
        return True

    def remove(self, request: QueuedRequest) -> bool:
        """Take a request out, to serve or to cancel it. False: it was not queued."""
        if not request.queued:
            return False
        level = self._levels[request.level]
        if request in level.on_time:
            del level.on_time[request]
            self._with_deadline -= request.queue_deadline is not None
        else:
            del level.postponed[request]
        if not level and request.level != self._config.default_level:
            del self._levels[request.level]
            self._level_order.remove(request.level)
        request.queued = False
        self.total_batch_size -= request.batch_size
        if len(self._deadlines) > 2 * self._with_deadline + _STALE_DEADLINES:
            self._deadlines = [entry for entry in self._deadlines if self._is_on_time(entry[2])]
            heapify(self._deadlines)
        return True

    def expire(self, now: int) -> list[QueuedRequest]:
        """Remove and return the requests whose deadline has passed; a policy with `postpone` keeps them in the queue,
        behind the others of their level."""
        expired: list[QueuedRequest] = []
        while (deadline := self.next_deadline) is not None and deadline <= now:
            request = heappop(self._deadlines)[2]
            if self._config.policy_of(request.level).postpone:
                level = self._levels[request.level]
                del level.on_time[request]
                level.postponed[request] = None
                self._with_deadline -= 1
            else:
                self.remove(request)
                expired.append(request)
        return expired

    @property
    def next_deadline(self) -> int | None:
        """The earliest deadline of a request that waits; None without any."""
        while self._deadlines and not self._is_on_time(self._deadlines[0][2]):
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def _is_on_time(self, request: QueuedRequest) -> bool:
        return request.queued and request in self._levels[request.level].on_time

    def check_integrity(self) -> None:
        """Recompute everything. Raises `AssertionError`."""
        waiting = list(self)
        assert len(set(waiting)) == len(waiting) == len(self)
        assert self.total_batch_size == sum(request.batch_size for request in waiting)
        assert self._level_order == sorted(self._levels)
        for number, level in self._levels.items():
            assert level or number == self._config.default_level
            members = chain(level.on_time, level.postponed)
            assert all(request.queued and request.level == number for request in members)
            assert all(request.queue_deadline is not None for request in level.postponed)
        dated = {request for request in waiting if request.queue_deadline is not None and self._is_on_time(request)}
        assert self._with_deadline == len(dated)
        assert dated <= {entry[2] for entry in self._deadlines}
        assert len(self._deadlines) <= 2 * self._with_deadline + _STALE_DEADLINES + 1
