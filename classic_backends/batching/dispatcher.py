"""Between the event loop and the instances of one model: requests queue up, free instances take batches of them.

The queue is under one lock. An instance takes its batches by itself, when it has ended one or was woken up: what comes
until it runs joins the batch. The event loop wakes those that are free, and watches the times. What becomes of requests
is told to a `Clerk` in the loop's thread.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from ...core.errors import Exiting, NotReady, RequestTimeout, Unavailable
from .batch_execution import Form, Result, execute, stream
from .deadline_timer import Alarm
from .dynamic_batcher import Batch, Turn
from .inference_job import Job
from .instance import Instance
from .request_queue import Waiting

Request: TypeAlias = Waiting[Job]
Work: TypeAlias = Batch[Job]
Worker: TypeAlias = Instance[Work]


class Done(NamedTuple):
    """An execution, or of a decoupled model the part of it up to one response. `begun`: as `Waiting.arrived`."""

    work: Work
    begun: int
    result: Result


class Clerk(Protocol):
    """Hears what becomes of requests, in the event loop's thread."""

    def answered(self, done: Done) -> None:
        """The responses of a whole batch."""

    def streamed(self, done: Done) -> None:
        """One response of a decoupled model, or the error that ends it."""

    def ended(self, work: Work, begun: int) -> None:
        """A decoupled model has made its last response."""

    def refused(self, request: Request, error: Exception) -> None:
        """It left the queue without being executed."""


class Queue(Protocol):
    """Who waits, and which of them leave together; see `Batcher`. One caller at a time."""

    @property
    def portion(self) -> int: ...

    @property
    def backlog(self) -> int: ...

    def __len__(self) -> int: ...

    def add(self, request: Request, now: int) -> bool: ...

    def remove(self, request: Request) -> bool: ...

    def expire(self, now: int) -> Turn[Job]: ...

    def look(self, now: int) -> Turn[Job]: ...

    def take(self, now: int) -> Turn[Job]: ...

    def drain(self) -> Sequence[Request]: ...


class Dispatcher:
    """Owns `queue`. `decoupled`: its instances make any number of responses."""

    def __init__(self, queue: Queue, form: Form, clerk: Clerk, decoupled: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self._form = form
        self._clerk = clerk
        self._decoupled = decoupled
        self._lock = threading.Lock()
        self._queue = queue
        self._portion = queue.portion
        self._alarm = Alarm(self._look)
        self._workers: set[Worker] = set()
        self._free: list[Worker] = []
        self._waking: set[Worker] = set()
        self._closed = False

    def __len__(self) -> int:
        """Requests that wait."""
        return len(self._queue)

    # The event loop's side

    def add_worker(self, worker: Worker) -> None:
        with self._lock:
            self._free.append(worker)
        self._workers.add(worker)
        self._look()

    def remove_worker(self, worker: Worker) -> None:
        """It is lost. Without another one nobody waits: when there will be one is uncertain."""
        self._workers.discard(worker)
        with self._lock:
            if worker in self._free:
                self._free.remove(worker)
            waiting = [] if self._workers else self._queue.drain()
        for request in waiting:
            self._clerk.refused(request, restarting(request))

    def submit(self, request: Request) -> None:
        """Raises `Unavailable` where the queue is full, or closed, or nobody is there to serve it."""
        if self._closed:
            raise stopping(request)
        if not self._workers:
            raise restarting(request)
        now = time.monotonic_ns()
        with self._lock:
            if not self._queue.add(request, now):
                raise Unavailable(f"{prefix(request.item.id)}Exceeds maximum queue size")
            free = bool(self._free)
        if free:
            self._look()
        elif request.deadline is not None:
            self._alarm.set(request.deadline)

    def leave(self, request: Request) -> bool:
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
            self._clerk.refused(request, stopping(request))

    def _look(self) -> None:
        """Wake as many free instances as have something to do; see to what time does."""
        while True:
            worker = None
            with self._lock:
                wanted = self._wants_another()
                turn = self._queue.look(time.monotonic_ns()) if wanted else self._queue.expire(time.monotonic_ns())
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

    def _settle(self, turn: Turn[Job]) -> None:
        for request in turn.refused:
            self._clerk.refused(request, RequestTimeout())
        if turn.until is not None:
            self._alarm.set(turn.until)

    # The instances' side

    def execute(self, instance: Worker, work: Work) -> None:
        begun = time.monotonic_ns()
        jobs = [request.item for request in work.requests]
        if self._decoupled:
            self._stream(instance, work, begun)
        else:
            result = execute(instance.runtime, self._form, jobs, instance.name)
            self._tell(self._clerk.answered, Done(work, begun, result))

    def _stream(self, instance: Worker, work: Work, begun: int) -> None:
        [request] = work.requests
        job = request.item
        results = stream(instance.runtime, self._form, job, instance.name)
        try:
            for result in results:
                instance.stopwatch.stop()
                if job.room is not None:
                    job.room.acquire()
                if job.given_up:
                    break
                self._tell(self._clerk.streamed, Done(work, begun, result))
                instance.stopwatch.start()
        finally:
            results.close()
        self._tell(self._clerk.ended, work, begun)

    def next(self, instance: Worker) -> Work | None:
        if instance.lost:
            with self._lock:
                self._waking.discard(instance)
            self._tell(self._look)
            return None
        with self._lock:
            self._waking.discard(instance)
            turn = self._queue.take(time.monotonic_ns())
            if turn.batch is None:
                self._free.append(instance)
            more = turn.batch is not None and self._wants_another()
        if turn.refused or turn.until is not None:
            self._tell(self._settle, turn)
        if more:
            self._tell(self._look)
        return turn.batch

    def _tell(self, call: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *arguments)
        except RuntimeError:
            return  # the event loop is gone, and all who would hear


def stopping(request: Request) -> Exiting:
    message = "Server is stopping, scheduler for model has stopped accepting new inference requests"
    return Exiting(f"{prefix(request.item.id)}{message}")


def restarting(request: Request) -> NotReady:
    return NotReady(f"{prefix(request.item.id)}the model's instances have ended unexpectedly and are being restarted")


def prefix(request_id: str) -> str:
    """What Triton puts before what it says of one request."""
    return f"[request id: {request_id or '<id_unknown>'}] "
