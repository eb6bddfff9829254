"""Triton's dynamic batcher: which requests leave the queue together, and when.

Source: https://github.com/triton-inference-server/server/blob/main/docs/user_guide/batcher.md. Pure logic over times
(nanoseconds) that its caller gives; asked whenever an instance is free. Knows nothing of tensors.
"""

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ...telemetry.model_metrics import CloseReason
from .batching_config import BatchingConfig
from .queued_request import QueuedRequest
from .request_queue import RequestQueue


class RequestBatch(NamedTuple):
    """Requests that are executed together, in the order in which they are served."""

    requests: Sequence[QueuedRequest]
    close_reason: CloseReason

    @property
    def size(self) -> int:
        return sum(request.batch_size for request in self.requests)


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
    """The queue of one model and the batches made from it. `work_per_instance`: how much of the `backlog` keeps one
    instance busy."""

    def __init__(self, config: BatchingConfig) -> None:
        self._config = config
        self._target_size = config.target_size
        self._queue = RequestQueue(config)
        self._delay: _Delay | None = None
        self.work_per_instance = config.target_size if config.combine_requests else 1

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
        batch, delay = None, self._delay
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
        for request in decision.batch.requests:
            self._queue.remove(request)
        return decision._replace(ask_again_at=self._queue.next_deadline)

    def settle_batch(self, again: Sequence[QueuedRequest], held: Mapping[QueuedRequest, bool], now: int) -> None:
        """The batch taken last is executed, by a runtime that takes requests as they are. Those to queue `again`, and
        those `held`, of which more is to come: true for one that waits for its reader. Only models with sequences have
        such requests."""

    def release(self, request: QueuedRequest, again: bool, now: int) -> bool:
        """A request is finished, or is to be queued `again`. False: it was not held."""
        return False

    def drain(self) -> list[QueuedRequest]:
        """Remove and return all requests."""
        waiting, self._delay = list(self._queue), None
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
        delay, sizes = self._config.max_delay_ns, self._config.preferred_sizes
        oldest = min(request.queued_at for request in requests)
        exceeded = 0 < delay <= now - oldest
        if preferred and not exceeded:
            whole = preferred == len(requests)
            return RequestBatch(requests[:preferred], closed_by if closed_by and whole else CloseReason.PREFERRED)
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
