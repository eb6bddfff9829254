"""Triton's dynamic batcher: the queue of priority levels with deadlines, and the batches that leave it.

Source: https://github.com/triton-inference-server/server/blob/main/docs/user_guide/batcher.md. Pure logic over times
that its caller gives, in nanoseconds; asked whenever an instance is free. Knows nothing of tensors.
"""

from bisect import bisect_right, insort
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import chain, count
from typing import NamedTuple

from ...telemetry.model_metrics import CloseReason
from .batching_config import BatchingConfig
from .queued_request import QueuedRequest, RequestBatch

_STALE_DEADLINES = 64
"""As many deadlines are kept of requests that have left, before they are swept up."""


@dataclass(slots=True)
class _PriorityLevel:
    """Requests before their deadline, and those postponed because theirs has passed, each in order of arrival."""

    on_time: "OrderedDict[QueuedRequest, None]" = field(default_factory=OrderedDict)
    postponed: "OrderedDict[QueuedRequest, None]" = field(default_factory=OrderedDict)

    def __len__(self) -> int:
        return len(self.on_time) + len(self.postponed)


class RequestQueue:
    """The requests that wait, by level and order of arrival. A level exists while a request waits in it (the default
    level always): a config may have as many as a 64-bit number says."""

    def __init__(self, config: BatchingConfig) -> None:
        self._config = config
        self._levels = {config.default_level: _PriorityLevel()}
        self._level_order = [config.default_level]
        self._deadlines: list[tuple[int, int, QueuedRequest]] = []
        self._serial = count()
        self._with_deadline = 0
        self.total_batch_size = 0
        """The sum over all requests that wait."""

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
        config = self._config
        number = config.default_level if config.priority_levels == 1 else config.level_of(request.priority)
        policy = config.policy_of(number) if config.policies else config.policy
        level = self._levels.get(number)
        if level is None:
            level = self._levels[number] = _PriorityLevel()
            insort(self._level_order, number)
        if policy.max_size and len(level) >= policy.max_size:
            return False
        request.level = number
        request.queued_at = now
        request.queued = True
        request.arrived_at = request.arrived_at or now
        if policy.timeout_ns:
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
        with_deadline = {
            request for request in waiting if request.queue_deadline is not None and self._is_on_time(request)
        }
        assert self._with_deadline == len(with_deadline)
        assert with_deadline <= {entry[2] for entry in self._deadlines}
        assert len(self._deadlines) <= 2 * self._with_deadline + _STALE_DEADLINES + 1


class BatchDecision(NamedTuple):
    """The answer of a batch queue: a `batch` if one is due, and the requests that have `expired` and left the queue.
    Without a batch, `ask_again_at` is the time of the next decision if no request comes or leaves (None: never)."""

    batch: RequestBatch | None
    expired: Sequence[QueuedRequest] = ()
    ask_again_at: int | None = None


class _Delay(NamedTuple):
    """A batch that waits for more requests. Nothing changes before `until` while new requests have this `batch_key`,
    queue up behind all others and leave the queue smaller than `size`."""

    until: int
    batch_key: object
    size: int


class DynamicBatcher:
    """The queue of one model and the batches made from it."""

    def __init__(self, config: BatchingConfig) -> None:
        self._config = config
        self._target_size = config.target_size
        self._queue = RequestQueue(config)
        self._delay: _Delay | None = None
        self._delayed_since: int | None = None
        """Since when an instance is free, and the first in line waits for more requests."""
        self.work_per_instance = config.target_size if config.combine_requests else 1
        """As much of the `backlog` keeps one instance busy."""

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def backlog(self) -> int:
        """The work that waits: items where requests are combined, else requests."""
        return self._queue.total_batch_size if self._config.combine_requests else len(self._queue)

    def add(self, request: QueuedRequest, now: int) -> bool:
        """Queue a request. False: the queue is full."""
        if not self._queue.add(request, now):
            return False
        if len(self._queue) == 1:
            self._delayed_since = None
        if self._delay is not None and (request.batch_key != self._delay.batch_key or self._config.can_reorder):
            self._delay = None
        return True

    def remove(self, request: QueuedRequest) -> bool:
        """Cancel a request. False: it was not queued any more."""
        self._delay = None
        return self._queue.remove(request)

    def expire_requests(self, now: int) -> BatchDecision:
        """The decision while no instance is free: which requests have expired."""
        expired = self._queue.expire(now)
        if expired:
            self._delay = None
        return BatchDecision(None, expired, self._queue.next_deadline)

    def peek_batch(self, now: int) -> BatchDecision:
        """The decision for a free instance; a batch stays in the queue, and may still grow."""
        expired = self._queue.expire(now)
        batch = None
        delay = self._delay
        if expired or delay is None or now >= delay.until or self._queue.total_batch_size >= delay.size:
            self._delay = None
            batch = self._next_batch(now)
        ask_again_at = self._queue.next_deadline
        if self._delay is not None and (ask_again_at is None or self._delay.until < ask_again_at):
            ask_again_at = self._delay.until
        return BatchDecision(batch, expired, ask_again_at)

    def take_batch(self, now: int) -> BatchDecision:
        """The decision for a free instance; a batch leaves the queue."""
        decision = self.peek_batch(now)
        if decision.batch is None:
            return decision
        delayed = 0
        for request in decision.batch.requests:
            if self._delayed_since is not None:
                delayed += now - max(self._delayed_since, request.queued_at)
            self._queue.remove(request)
        self._delayed_since = None
        return decision._replace(
            batch=decision.batch._replace(delay_ns=delayed), ask_again_at=self._queue.next_deadline
        )

    def settle_batch(self, again: Sequence[QueuedRequest], held: Mapping[QueuedRequest, bool], now: int) -> None:
        """The batch taken last is executed, by a runtime that takes requests as they are; see `RequestSource`. Only
        models with sequences have requests that are queued again or held."""

    def release(self, request: QueuedRequest, again: bool, now: int) -> bool:
        """A request is finished, or is to be queued `again`. False: it was not held."""
        return False

    def waiting_requests(self) -> list[QueuedRequest]:
        """The requests that a batch may have next."""
        return list(self._queue)

    def drain(self) -> list[QueuedRequest]:
        """Remove and return all requests."""
        waiting = list(self._queue)
        self._delay = None
        for request in waiting:
            self._queue.remove(request)
        return waiting

    def _next_batch(self, now: int) -> RequestBatch | None:
        """The batch that leaves now; None, and `_delay` is set, if the requests should wait for more."""
        if not self._config.combine_requests:
            first = next(iter(self._queue), None)
            return None if first is None else RequestBatch([first], CloseReason.ALONE)
        requests, size, preferred, closed_by = self._fitting_requests()
        if not requests:
            return None
        delay = self._config.max_delay_ns
        sizes = self._config.preferred_sizes
        oldest = min(request.queued_at for request in requests)
        exceeded = 0 < delay <= now - oldest
        if preferred and not exceeded:
            takes_all = preferred == len(requests)
            return RequestBatch(requests[:preferred], closed_by if closed_by and takes_all else CloseReason.PREFERRED)
        if closed_by:
            return RequestBatch(requests, closed_by)
        if size >= self._target_size:
            return RequestBatch(requests, CloseReason.FULL)
        if exceeded or not delay:
            return RequestBatch(requests, CloseReason.DELAY if exceeded else CloseReason.IDLE)
        # A deadline removes a request or moves it behind the others: those in front may then have a preferred size.
        until = min(oldest + delay, self._queue.next_deadline or oldest + delay)
        larger = bisect_right(sizes, size)
        next_size = sizes[larger] if larger < len(sizes) else self._target_size
        self._delay = _Delay(until, requests[0].batch_key, next_size)
        self._delayed_since = now if self._delayed_since is None else self._delayed_since
        return None

    def _fitting_requests(self) -> tuple[list[QueuedRequest], int, int, CloseReason | None]:
        """The requests that fit in one batch now, their size, the number of them that have a preferred size (0: none),
        and why the next request does not fit, if there is one."""
        chosen: list[QueuedRequest] = []
        size = preferred = 0
        for request in self._queue:
            if chosen:
                if size + request.batch_size > self._target_size and not preferred:
                    preferred = len(chosen)
                if size + request.batch_size > self._config.max_batch_size:
                    return chosen, size, preferred, CloseReason.FULL
                if request.batch_key != chosen[0].batch_key:
                    return chosen, size, preferred, CloseReason.DIFFERS
            chosen.append(request)
            size += request.batch_size
            if size in self._config.preferred_sizes:
                preferred = len(chosen)
        return chosen, size, preferred, None

    def check_integrity(self) -> None:
        """Raises `AssertionError`."""
        self._queue.check_integrity()
        assert self._delay is None or len(self._queue) > 0
