"""Which requests leave the queue together, and when: Triton's dynamic batcher (model-config.md section 4.2).

Pure logic over the times it is told (nanoseconds); asked whenever an instance is free. Knows nothing of tensors.
"""

from bisect import bisect_right
from collections.abc import Sequence
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from .batching_config import BatchingConfig
from .request_queue import QueuedRequest, RequestQueue

T = TypeVar("T")


class CloseReason(StrEnum):
    """Why a batch left with these requests and no more."""

    ALONE = "model_does_not_batch"
    FULL = "batch_full"
    PREFERRED = "preferred_size"
    DIFFERS = "shapes_differ"
    DELAY = "delay_too_short"
    IDLE = "instance_idle"


class RequestBatch(NamedTuple, Generic[T]):
    """Requests that are executed together, in the order in which they were served."""

    requests: Sequence[QueuedRequest[T]]
    close_reason: CloseReason

    @property
    def size(self) -> int:
        return sum(request.batch_size for request in self.requests)


class BatchDecision(NamedTuple, Generic[T]):
    """What comes of asking: a `batch`, or None; requests `refused` because their time ran out, which left
    too; and without a batch, the time at which to ask again `until` which nothing changes by itself (None: never)."""

    batch: RequestBatch[T] | None
    expired: Sequence[QueuedRequest[T]] = ()
    ask_again_at: int | None = None


class _PendingBatch(NamedTuple):
    """A batch that waits for company: nothing changes before `until` as long as only requests of this `kind` come,
    behind all others, and all together stay below `size`."""

    until: int
    kind: object
    size: int


class _Candidate(NamedTuple, Generic[T]):
    """What fits in one batch now, all of it or the `marked` first; `stopped`: why the next did not."""

    requests: list[QueuedRequest[T]]
    size: int
    marked: int
    stopped: CloseReason | None


class DynamicBatcher(Generic[T]):
    """The queue of one model and the batches made from it."""

    def __init__(self, rules: BatchingConfig) -> None:
        self._rules = rules
        self._largest = rules.target_size
        self._queue = RequestQueue[T](rules)
        self._pause: _PendingBatch | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: QueuedRequest[T], now: int) -> bool:
        """False: the queue is full."""
        if not self._queue.add(request, now):
            return False
        if self._pause is not None and (request.batch_key != self._pause.kind or self._rules.can_reorder):
            self._pause = None
        return True

    def remove(self, request: QueuedRequest[T]) -> bool:
        """It has given up. False: it had left the queue already."""
        self._pause = None
        return self._queue.remove(request)

    def expire_requests(self, now: int) -> BatchDecision[T]:
        """What time alone does, while no instance is free."""
        refused = self._queue.expire(now)
        if refused:
            self._pause = None
        return BatchDecision(None, refused, self._queue.next_deadline)

    def peek_batch(self, now: int) -> BatchDecision[T]:
        """What an instance that is free would do; a batch stays in the queue, and may still grow."""
        refused = self._queue.expire(now)
        batch = None
        if refused or not self._pauses(now):
            self._pause = None
            batch = self._next(now)
        until = None if self._pause is None else self._pause.until
        return BatchDecision(batch, refused, _earlier(until, self._queue.next_deadline))

    def take_batch(self, now: int) -> BatchDecision[T]:
        """What an instance that is free does: a batch leaves the queue."""
        turn = self.peek_batch(now)
        if turn.batch is None:
            return turn
        for request in turn.batch.requests:
            self._queue.remove(request)
        return turn._replace(ask_again_at=self._queue.next_deadline)

    @property
    def work_per_instance(self) -> int:
        """How much of a backlog keeps one instance busy."""
        return self._rules.work_per_instance

    @property
    def backlog(self) -> int:
        """How much waits, as `portion` counts it."""
        return self._queue.total_batch_size if self._rules.combine_requests else len(self._queue)

    def drain(self) -> list[QueuedRequest[T]]:
        """Everybody out."""
        waiting = list(self._queue)
        for request in waiting:
            self.remove(request)
        return waiting

    def _pauses(self, now: int) -> bool:
        pause = self._pause
        return pause is not None and now < pause.until and self._queue.total_batch_size < pause.size

    def _next(self, now: int) -> RequestBatch[T] | None:
        if not self._rules.combine_requests:
            first = next(iter(self._queue), None)
            return None if first is None else RequestBatch([first], CloseReason.ALONE)
        draft = self._draft()
        return self._decide(draft, now) if draft.requests else None

    def _draft(self) -> _Candidate[T]:
        chosen: list[QueuedRequest[T]] = []
        size = marked = 0
        for request in self._queue:
            if chosen:
                if size + request.batch_size > self._largest and not marked:
                    marked = len(chosen)
                if size + request.batch_size > self._rules.max_batch_size:
                    return _Candidate(chosen, size, marked, CloseReason.FULL)
                if request.batch_key != chosen[0].batch_key:
                    return _Candidate(chosen, size, marked, CloseReason.DIFFERS)
            chosen.append(request)
            size += request.batch_size
            if size in self._rules.preferred_sizes:
                marked = len(chosen)
        return _Candidate(chosen, size, marked, None)

    def _decide(self, draft: _Candidate[T], now: int) -> RequestBatch[T] | None:
        requests, size, marked, stopped = draft
        delay = self._rules.max_delay_ns
        oldest = min(request.arrived_at for request in requests)
        exceeded = 0 < delay <= now - oldest
        if marked and not exceeded:
            all_of_it = marked == len(requests)
            return RequestBatch(requests[:marked], stopped if stopped and all_of_it else CloseReason.PREFERRED)
        if stopped:
            return RequestBatch(requests, stopped)
        if size >= self._largest:
            return RequestBatch(requests, CloseReason.FULL)
        if exceeded or not delay:
            return RequestBatch(requests, CloseReason.DELAY if exceeded else CloseReason.IDLE)
        # A deadline refuses a request or moves it behind the others: what then stands in front may be a preferred size.
        until = min(oldest + delay, self._queue.next_deadline or oldest + delay)
        self._pause = _PendingBatch(until, requests[0].batch_key, self._next_size(size))
        return None

    def _next_size(self, size: int) -> int:
        """The first size above `size` that changes anything."""
        above = bisect_right(self._rules.preferred_sizes, size)
        return self._rules.preferred_sizes[above] if above < len(self._rules.preferred_sizes) else self._largest

    def check_integrity(self) -> None:
        """Raises `AssertionError`."""
        self._queue.check_integrity()
        assert self._pause is None or len(self._queue) > 0


def _earlier(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else min(one, other)
