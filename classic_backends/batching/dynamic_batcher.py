"""Which requests leave the queue together, and when: Triton's dynamic batcher (model-config.md section 4.2).

Pure logic over the times it is told (nanoseconds); asked whenever an instance is free. Knows nothing of tensors.
"""

from bisect import bisect_right
from collections.abc import Sequence
from enum import StrEnum
from typing import Generic, NamedTuple, TypeVar

from .batching_config import Batching
from .request_queue import RequestQueue, Waiting

T = TypeVar("T")


class Cause(StrEnum):
    """Why a batch left with these requests and no more."""

    ALONE = "model_does_not_batch"
    FULL = "batch_full"
    PREFERRED = "preferred_size"
    DIFFERS = "shapes_differ"
    DELAY = "delay_too_short"
    IDLE = "instance_idle"


class Batch(NamedTuple, Generic[T]):
    """Requests that are executed together, in the order in which they were served."""

    requests: Sequence[Waiting[T]]
    cause: Cause

    @property
    def size(self) -> int:
        return sum(request.size for request in self.requests)


class Turn(NamedTuple, Generic[T]):
    """What comes of asking: a `batch`, or None; requests `refused` because their time ran out, which left
    too; and without a batch, the time at which to ask again `until` which nothing changes by itself (None: never)."""

    batch: Batch[T] | None
    refused: Sequence[Waiting[T]] = ()
    until: int | None = None


class _Pause(NamedTuple):
    """A batch that waits for company: nothing changes before `until` as long as only requests of this `kind` come,
    behind all others, and all together stay below `size`."""

    until: int
    kind: object
    size: int


class _Draft(NamedTuple, Generic[T]):
    """What fits in one batch now, all of it or the `marked` first; `stopped`: why the next did not."""

    requests: list[Waiting[T]]
    size: int
    marked: int
    stopped: Cause | None


class Batcher(Generic[T]):
    """The queue of one model and the batches made from it."""

    def __init__(self, rules: Batching) -> None:
        self._rules = rules
        self._largest = rules.largest
        self._queue = RequestQueue[T](rules)
        self._pause: _Pause | None = None

    def __len__(self) -> int:
        return len(self._queue)

    def add(self, request: Waiting[T], now: int) -> bool:
        """False: the queue is full."""
        if not self._queue.add(request, now):
            return False
        if self._pause is not None and (request.kind != self._pause.kind or self._rules.reorders):
            self._pause = None
        return True

    def remove(self, request: Waiting[T]) -> bool:
        """It has given up. False: it had left the queue already."""
        self._pause = None
        return self._queue.remove(request)

    def expire(self, now: int) -> Turn[T]:
        """What time alone does, while no instance is free."""
        refused = self._queue.expire(now)
        if refused:
            self._pause = None
        return Turn(None, refused, self._queue.next_deadline)

    def look(self, now: int) -> Turn[T]:
        """What an instance that is free would do; a batch stays in the queue, and may still grow."""
        refused = self._queue.expire(now)
        batch = None
        if refused or not self._pauses(now):
            self._pause = None
            batch = self._next(now)
        until = None if self._pause is None else self._pause.until
        return Turn(batch, refused, _earlier(until, self._queue.next_deadline))

    def take(self, now: int) -> Turn[T]:
        """What an instance that is free does: a batch leaves the queue."""
        turn = self.look(now)
        if turn.batch is None:
            return turn
        for request in turn.batch.requests:
            self._queue.remove(request)
        return turn._replace(until=self._queue.next_deadline)

    @property
    def portion(self) -> int:
        """How much of a backlog keeps one instance busy."""
        return self._rules.portion

    @property
    def backlog(self) -> int:
        """How much waits, as `portion` counts it."""
        return self._queue.size if self._rules.combine else len(self._queue)

    def drain(self) -> list[Waiting[T]]:
        """Everybody out."""
        waiting = list(self._queue)
        for request in waiting:
            self.remove(request)
        return waiting

    def _pauses(self, now: int) -> bool:
        pause = self._pause
        return pause is not None and now < pause.until and self._queue.size < pause.size

    def _next(self, now: int) -> Batch[T] | None:
        if not self._rules.combine:
            first = next(iter(self._queue), None)
            return None if first is None else Batch([first], Cause.ALONE)
        draft = self._draft()
        return self._decide(draft, now) if draft.requests else None

    def _draft(self) -> _Draft[T]:
        chosen: list[Waiting[T]] = []
        size = marked = 0
        for request in self._queue:
            if chosen:
                if size + request.size > self._largest and not marked:
                    marked = len(chosen)
                if size + request.size > self._rules.max_size:
                    return _Draft(chosen, size, marked, Cause.FULL)
                if request.kind != chosen[0].kind:
                    return _Draft(chosen, size, marked, Cause.DIFFERS)
            chosen.append(request)
            size += request.size
            if size in self._rules.preferred:
                marked = len(chosen)
        return _Draft(chosen, size, marked, None)

    def _decide(self, draft: _Draft[T], now: int) -> Batch[T] | None:
        requests, size, marked, stopped = draft
        delay = self._rules.max_delay
        oldest = min(request.arrived for request in requests)
        exceeded = 0 < delay <= now - oldest
        if marked and not exceeded:
            all_of_it = marked == len(requests)
            return Batch(requests[:marked], stopped if stopped and all_of_it else Cause.PREFERRED)
        if stopped:
            return Batch(requests, stopped)
        if size >= self._largest:
            return Batch(requests, Cause.FULL)
        if exceeded or not delay:
            return Batch(requests, Cause.DELAY if exceeded else Cause.IDLE)
        # A deadline refuses a request or moves it behind the others: what then stands in front may be a preferred size.
        until = min(oldest + delay, self._queue.next_deadline or oldest + delay)
        self._pause = _Pause(until, requests[0].kind, self._next_size(size))
        return None

    def _next_size(self, size: int) -> int:
        """The first size above `size` that changes anything."""
        above = bisect_right(self._rules.preferred, size)
        return self._rules.preferred[above] if above < len(self._rules.preferred) else self._largest

    def check_integrity(self) -> None:
        """Raises `AssertionError`."""
        self._queue.check_integrity()
        assert self._pause is None or len(self._queue) > 0


def _earlier(one: int | None, other: int | None) -> int | None:
    return other if one is None else one if other is None else min(one, other)
