"""Between the event loop and the instances of one model: requests queue up, free instances take batches of them.

One lock guards the queue. An instance takes its next batch itself, when it has finished one or was woken: requests that
come until then join the batch. The event loop wakes free instances and keeps the deadlines.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from functools import partial

from ...core.errors import NotReady, RequestTimeout, ServerExiting, Unavailable, request_id_prefix
from ...core.wait_graph import QueueWaits
from .batch_execution import BatchLayout, execute_batch, execute_decoupled
from .dynamic_batcher import BatchDecision, DynamicBatcher
from .instance import Instance, call_in_loop
from .queued_request import QueuedRequest, RequestBatch, endless_requests
from .request_execution import RequestExecutor
from .response_router import BatchResult, ResponseRouter


class DeadlineTimer:
    """One timer of the event loop, set to the earliest of several times."""

    def __init__(self, on_due: Callable[[], None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_due = on_due
        self._timer: asyncio.TimerHandle | None = None
        self._stopped = False
        self.due_at: int | None = None
        """Nanoseconds of `time.monotonic_ns`; None while it is not set."""

    def set_no_later_than(self, time_ns: int) -> None:
        if self._stopped or (self.due_at is not None and self.due_at <= time_ns):
            return
        if self._timer is not None:
            self._timer.cancel()
        self.due_at = time_ns
        self._timer = self._loop.call_later(max(0, time_ns - time.monotonic_ns()) / 1e9, self._run)

    def stop(self) -> None:
        """Never call `on_due` again."""
        self._stopped = True
        self.due_at = None
        if self._timer is not None:
            self._timer.cancel()

    def _run(self) -> None:
        self._timer = None
        self.due_at = None
        self._on_due()


class Dispatcher:
    """The queue and the instances of one model: the `WorkSource` of these, and the `RequestSource` of executions.
    `decoupled`: the model makes any number of responses to a request."""

    def __init__(self, queue: DynamicBatcher, layout: BatchLayout, router: ResponseRouter, decoupled: bool) -> None:
        self.call_in_loop = partial(call_in_loop, asyncio.get_running_loop())
        self._layout = layout
        self._router = router
        self._decoupled = decoupled
        self._executor = RequestExecutor(layout, decoupled, router, self) if layout.by_request else None
        self._lock = threading.Lock()
        self._queue = queue
        self._timer = DeadlineTimer(self._wake_instances)
        self._instances: set[Instance] = set()
        self._free: list[Instance] = []
        self._waking: set[Instance] = set()
        """Instances that were free, and have not yet asked for a batch."""
        self._released_early: set[QueuedRequest] = set()
        """Requests that come again, whose batch is not settled yet."""
        self._closed = False

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    # In the event loop's thread

    def add_instance(self, instance: Instance) -> None:
        with self._lock:
            self._free.append(instance)
            self._instances.add(instance)
        self._wake_instances()

    def remove_instance(self, instance: Instance) -> None:
        """Forget a lost instance. Without another one all requests are rejected: it is uncertain when there will be
        one. Those that were executed before are told by the runtime."""
        with self._lock:
            self._instances.discard(instance)
            self._waking.discard(instance)
            if instance in self._free:
                self._free.remove(instance)
            waiting = [] if self._instances else self._queue.drain()
        for request in waiting:
            if request.execution is None:
                self._router.on_rejected(request, restarting_error(request))
        self._wake_instances()

    def submit(self, request: QueuedRequest) -> None:
        """Queue a request. Raises `Unavailable` if the queue is full or closed, or no instance is there."""
        if self._closed:
            raise stopping_error(request)
        if not self._instances:
            raise restarting_error(request)
        now = time.monotonic_ns()
        with self._lock:
            if not self._queue.add(request, now):
                raise Unavailable(f"{request_id_prefix(request.request_id)}Exceeds maximum queue size")
            free = bool(self._free)
        if free:
            self._wake_instances()
        elif request.queue_deadline is not None:
            self._timer.set_no_later_than(request.queue_deadline)

    def release(self, request: QueuedRequest, again: bool = False) -> None:
        """A request that its runtime has held is finished, or is to be executed `again`."""
        with self._lock:
            dropped = again and not self._can_come_again(request)
            was_held = self._queue.release(request, again and not dropped, time.monotonic_ns())
            if again and not was_held:
                self._released_early.add(request)
        if was_held:
            self._wake_instances()
        if dropped:
            self._drop(request)

    def _can_come_again(self, request: QueuedRequest) -> bool:
        return not (self._closed or request.given_up or request.finished)

    def _drop(self, request: QueuedRequest) -> None:
        """End a request that is rescheduled and cannot come again."""
        if request.execution is not None and (request.given_up or request.finished):
            request.execution.cancel()
        if request.given_up and not request.finished:
            self._router.on_finished([request])
        elif self._instances and not request.finished:  # without them, its runtime tells that its process has ended
            self._router.on_rejected(request, stopping_error(request))

    def cancel_request(self, request: QueuedRequest) -> bool:
        """Take a request out of the queue. False: it had left already; its responses are dropped by `given_up`."""
        with self._lock:
            was_queued = self._queue.remove(request)
            free = bool(self._free)
        if was_queued and free:
            self._wake_instances()
        return was_queued

    def queue_waits(self) -> list[QueueWaits]:
        with self._lock:
            waiting = self._queue.waiting_requests()
        instances = sorted(self._instances, key=lambda instance: instance.name)
        return [QueueWaits([instance.waits() for instance in instances], endless_requests(waiting))]

    def close(self) -> None:
        """Reject the requests that wait, and those that come."""
        self._closed = True
        self._timer.stop()
        with self._lock:
            waiting = self._queue.drain()
        for request in waiting:
            self._router.on_rejected(request, stopping_error(request))

    def _wake_instances(self) -> None:
        """Wake as many free instances as there is work for, and set the timer for the next decision."""
        while True:
            instance = None
            with self._lock:
                decide = self._queue.peek_batch if self._needs_another() else self._queue.expire_requests
                decision = decide(time.monotonic_ns())
                if decision.batch is not None:
                    instance = self._free.pop()
                    self._waking.add(instance)
            self._apply(decision)
            if instance is None:
                return
            instance.wake(self)

    def _needs_another(self) -> bool:
        """Whether an instance is free, and those being woken will not take the whole backlog. Needs the lock."""
        return bool(self._free) and self._queue.backlog > len(self._waking) * self._queue.work_per_instance

    def _apply(self, decision: BatchDecision) -> None:
        for request in decision.expired:
            self._router.on_rejected(request, RequestTimeout())
        if decision.ask_again_at is not None:
            self._timer.set_no_later_than(decision.ask_again_at)

    # In the instances' threads

    def execute_batch(self, instance: Instance, batch: RequestBatch) -> None:
        if self._executor is not None:
            self._executor.execute_batch(instance.runtime, batch, instance.name)
        elif self._decoupled:
            self._execute_decoupled(instance, batch)
        else:
            started_at = time.monotonic_ns()
            jobs = [request.job for request in batch.requests]
            result = execute_batch(instance.runtime, self._layout, jobs, instance.name)
            self.call_in_loop(self._router.on_batch_done, BatchResult(batch, started_at, result))

    def _execute_decoupled(self, instance: Instance, batch: RequestBatch) -> None:
        started_at = time.monotonic_ns()
        [request] = batch.requests
        with closing(execute_decoupled(instance.runtime, self._layout, request.job, instance.name)) as results:
            for result in results:
                instance.execution_timer.stop()
                slots = request.channel.unread_slots
                if slots is not None and not slots.acquire(blocking=False):
                    self.call_in_loop(self._router.on_reader_wait, 1)
                    slots.acquire()
                    self.call_in_loop(self._router.on_reader_wait, -1)
                if request.given_up:
                    break
                self.call_in_loop(self._router.on_stream_response, BatchResult(batch, started_at, result))
                instance.execution_timer.start()
        self.call_in_loop(self._router.on_stream_end, batch, started_at)

    def settle_batch(self, again: Sequence[QueuedRequest], held: Mapping[QueuedRequest, bool]) -> None:
        with self._lock:
            coming = dict.fromkeys((*again, *(request for request in held if request in self._released_early)))
            for_readers = [request for request, for_reader in held.items() if for_reader]
            dropped = {request for request in (*coming, *for_readers) if not self._can_come_again(request)}
            still_held = {
                request: for_reader
                for request, for_reader in held.items()
                if not (request in coming or request in dropped or request.finished)
            }
            requeued = [request for request in coming if request not in dropped]
            self._released_early.clear()
            self._queue.settle_batch(requeued, still_held, time.monotonic_ns())
        for request in dropped:
            self.call_in_loop(self._drop, request)

    def next_batch(self, instance: Instance) -> RequestBatch | None:
        with self._lock:
            self._waking.discard(instance)
            # The loop may have noticed the end of its process first, and would wake it in vain.
            gone = instance.lost or instance not in self._instances
            decision = BatchDecision(None) if gone else self._queue.take_batch(time.monotonic_ns())
            if decision.batch is None and not gone:
                self._free.append(instance)
            needs_another = gone or (decision.batch is not None and self._needs_another())
        if decision.expired or decision.ask_again_at is not None:
            self.call_in_loop(self._apply, decision)
        if needs_another:
            self.call_in_loop(self._wake_instances)
        return decision.batch


def stopping_error(request: QueuedRequest) -> ServerExiting:
    message = "Server is stopping, scheduler for model has stopped accepting new inference requests"
    return ServerExiting(f"{request_id_prefix(request.request_id)}{message}")


def restarting_error(request: QueuedRequest) -> NotReady:
    message = "the model's instances have ended unexpectedly and are being restarted"
    return NotReady(f"{request_id_prefix(request.request_id)}{message}")
