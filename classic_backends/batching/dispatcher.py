"""Between the event loop and the instances of one model: requests queue up, free instances take batches of them.

The queue is under one lock. An instance takes its batches by itself, when it has ended one or was woken up: what comes
until it runs joins the batch. The event loop wakes those that are free, and watches the times. What becomes of requests
is told to a `DispatchListener` in the loop's thread.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from ...core.errors import NotReady, RequestTimeout, ServerExiting, Unavailable, request_id_prefix
from .batch_execution import BatchLayout, ExecutionResult, execute_batch, execute_decoupled
from .deadline_timer import DeadlineTimer
from .dynamic_batcher import BatchDecision, RequestBatch
from .inference_job import InferenceJob
from .instance import Instance
from .request_queue import QueuedRequest

QueuedJob: TypeAlias = QueuedRequest[InferenceJob]
JobBatch: TypeAlias = RequestBatch[InferenceJob]
JobInstance: TypeAlias = Instance[JobBatch]


class BatchResult(NamedTuple):
    """An execution, or of a decoupled model the part of it up to one response. `begun`: as `QueuedRequest.arrived`."""

    batch: JobBatch
    started_at: int
    result: ExecutionResult


class DispatchListener(Protocol):
    """Hears what becomes of requests, in the event loop's thread."""

    def on_batch_done(self, done: BatchResult) -> None:
        """The responses of a whole batch."""

    def on_stream_response(self, done: BatchResult) -> None:
        """One response of a decoupled model, or the error that ends it."""

    def on_stream_end(self, work: JobBatch, begun: int) -> None:
        """A decoupled model has made its last response."""

    def on_rejected(self, request: QueuedJob, error: Exception) -> None:
        """It left the queue without being executed."""


class BatchQueue(Protocol):
    """Who waits, and which of them leave together; see `DynamicBatcher`. One caller at a time."""

    @property
    def work_per_instance(self) -> int: ...

    @property
    def backlog(self) -> int: ...

    def __len__(self) -> int: ...

    def add(self, request: QueuedJob, now: int) -> bool: ...

    def remove(self, request: QueuedJob) -> bool: ...

    def expire_requests(self, now: int) -> BatchDecision[InferenceJob]: ...

    def peek_batch(self, now: int) -> BatchDecision[InferenceJob]: ...

    def take_batch(self, now: int) -> BatchDecision[InferenceJob]: ...

    def drain(self) -> Sequence[QueuedJob]: ...


class Dispatcher:
    """Owns `queue`. `decoupled`: its instances make any number of responses."""

    def __init__(self, queue: BatchQueue, form: BatchLayout, clerk: DispatchListener, decoupled: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._form = form
        self._clerk = clerk
        self._decoupled = decoupled
        self._lock = threading.Lock()
        self._queue = queue
        self._portion = queue.work_per_instance
        self._alarm = DeadlineTimer(self._look)
        self._workers: set[JobInstance] = set()
        self._free: list[JobInstance] = []
        self._waking: set[JobInstance] = set()
        self._closed = False

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    # The event loop's side

    def add_instance(self, worker: JobInstance) -> None:
        with self._lock:
            self._free.append(worker)
        self._workers.add(worker)
        self._look()

    def remove_instance(self, worker: JobInstance) -> None:
        """It is lost. Without another one nobody waits: when there will be one is uncertain."""
        self._workers.discard(worker)
        with self._lock:
            if worker in self._free:
                self._free.remove(worker)
            waiting = [] if self._workers else self._queue.drain()
        for request in waiting:
            self._clerk.on_rejected(request, restarting_error(request))

    def submit(self, request: QueuedJob) -> None:
        """Raises `Unavailable` where the queue is full, or closed, or nobody is there to serve it."""
        if self._closed:
            raise stopping_error(request)
        if not self._workers:
            raise restarting_error(request)
        now = time.monotonic_ns()
        with self._lock:
            if not self._queue.add(request, now):
                raise Unavailable(f"{request_id_prefix(request.item.request_id)}Exceeds maximum queue size")
            free = bool(self._free)
        if free:
            self._look()
        elif request.queue_deadline is not None:
            self._alarm.set_no_later_than(request.queue_deadline)

    def cancel_request(self, request: QueuedJob) -> bool:
        """It was given up: out of the queue at once; what runs is abandoned, and False."""
        with self._lock:
            waited = self._queue.remove(request)
            free = bool(self._free)
        if waited and free:
            self._look()
        return waited

    def close(self) -> None:
        """Refuse whoever waits or comes."""
        self._closed = True
        self._alarm.stop()
        with self._lock:
            waiting = self._queue.drain()
        for request in waiting:
            self._clerk.on_rejected(request, stopping_error(request))

    def _look(self) -> None:
        """Wake as many free instances as have something to do; see to what time does."""
        while True:
            worker = None
            with self._lock:
                wanted = self._wants_another()
                turn = (
                    self._queue.peek_batch(time.monotonic_ns())
                    if wanted
                    else self._queue.expire_requests(time.monotonic_ns())
                )
                if turn.batch is not None:
                    worker = self._free.pop()
                    self._waking.add(worker)
            self._settle(turn)
            if worker is None:
                return
            worker.wake(self)

    def _wants_another(self) -> bool:
        """Somebody is free, and those who were woken will not take all that waits. Under the lock."""
        return bool(self._free) and self._queue.backlog > len(self._waking) * self._portion

    def _settle(self, turn: BatchDecision[InferenceJob]) -> None:
        for request in turn.expired:
            self._clerk.on_rejected(request, RequestTimeout())
        if turn.ask_again_at is not None:
            self._alarm.set_no_later_than(turn.ask_again_at)

    # The instances' side

    def execute_batch(self, instance: JobInstance, work: JobBatch) -> None:
        begun = time.monotonic_ns()
        jobs = [request.item for request in work.requests]
        if self._decoupled:
            self._stream(instance, work, begun)
        else:
            result = execute_batch(instance.runtime, self._form, jobs, instance.name)
            self._tell(self._clerk.on_batch_done, BatchResult(work, begun, result))

    def _stream(self, instance: JobInstance, work: JobBatch, begun: int) -> None:
        [request] = work.requests
        job = request.item
        results = execute_decoupled(instance.runtime, self._form, job, instance.name)
        try:
            for result in results:
                instance.execution_timer.stop()
                if job.unread_slots is not None:
                    job.unread_slots.acquire()
                if job.given_up:
                    break
                self._tell(self._clerk.on_stream_response, BatchResult(work, begun, result))
                instance.execution_timer.start()
        finally:
            results.close()
        self._tell(self._clerk.on_stream_end, work, begun)

    def next_batch(self, instance: JobInstance) -> JobBatch | None:
        if instance.lost:
            with self._lock:
                self._waking.discard(instance)
            self._tell(self._look)
            return None
        with self._lock:
            self._waking.discard(instance)
            turn = self._queue.take_batch(time.monotonic_ns())
            if turn.batch is None:
                self._free.append(instance)
            more = turn.batch is not None and self._wants_another()
        if turn.expired or turn.ask_again_at is not None:
            self._tell(self._settle, turn)
        if more:
            self._tell(self._look)
        return turn.batch

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            return  # the event loop is gone, and all who would hear


def stopping_error(request: QueuedJob) -> ServerExiting:
    message = "Server is stopping, scheduler for model has stopped accepting new inference requests"
    return ServerExiting(f"{request_id_prefix(request.item.request_id)}{message}")


def restarting_error(request: QueuedJob) -> NotReady:
    return NotReady(
        request_id_prefix(request.item.request_id)
        + "the model's instances have ended unexpectedly and are being restarted"
    )
