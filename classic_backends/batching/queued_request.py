"""A request of a classic model from its arrival in the queue to its last response: its job, the channel to the task
that reads the responses, the order of channels, and the batches of such requests.

Channels belong to the event loop's thread, but for the slots that a decoupled model's instance takes.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ...core.request import InferResponse, ParameterValue
from ...core.request_context import RequestContext
from ...telemetry.model_metrics import CloseReason
from .inference_job import InferenceJob

_MAX_UNREAD = 256


class ResponseChannel:
    """The responses of one request, which a task reads one by one. `decoupled`: the model may make any number."""

    def __init__(self, decoupled: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self.unread_slots = threading.Semaphore(_MAX_UNREAD) if decoupled else None
        """A decoupled model takes one for each response, the reader gives it back; an instance that finds none
        waits."""
        self.ended = False
        """No more responses come, though the reader may not have read all."""
        self.held = False
        """Earlier requests of its `orderer`, if it has one, have not ended: nothing can be read yet."""
        self.orderer: ResponseOrderer | None = None
        self.on_drained: Callable[[], None] | None = None
        """Called once, when half of what may wait does."""
        self._responses: deque[InferResponse] = deque()
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None

    @property
    def full(self) -> bool:
        """Whether as many responses wait as may."""
        return len(self._responses) >= _MAX_UNREAD

    @property
    def drained(self) -> bool:
        """Whether no more than half of what may wait does."""
        return len(self._responses) <= _MAX_UNREAD // 2

    def put(self, response: InferResponse) -> None:
        self._responses.append(response)
        self.wake_reader()

    def end(self, error: Exception | None = None) -> None:
        self.ended = True
        self._error = error
        self.wake_reader()
        if self.orderer is not None:
            self.orderer.release()

    async def next_response(self) -> InferResponse | None:
        """The next response; None after the last. Raises the error that ended the stream."""
        while self.held or not self._responses:
            if self.ended and not self.held:
                if self._error is not None:
                    try:
                        raise self._error
                    finally:
                        self._error = None  # its traceback leads here: who reads would hold all of the request
                return None
            self._reader = self._loop.create_future()
            await self._reader
        if self.unread_slots is not None:
            self.unread_slots.release()
        if self.on_drained is not None and self.drained:
            self.on_drained()
            self.on_drained = None
        return self._responses.popleft()

    def wake_reader(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)


class ResponseOrderer:
    """Keeps the responses of a model with `preserve_ordering` in the order of its requests, whichever instance was
    faster."""

    def __init__(self) -> None:
        self._channels: deque[ResponseChannel] = deque()

    def add(self, channel: ResponseChannel) -> None:
        """Hold a new request's responses until all earlier requests have ended."""
        channel.orderer = self
        channel.held = True
        self._channels.append(channel)
        self.release()

    def release(self) -> None:
        """Let the first request be read and, where it has ended, those behind it."""
        while self._channels:
            first = self._channels[0]
            first.held = False
            first.wake_reader()
            if not first.ended:
                return
            self._channels.popleft()


class OpenExecution(Protocol):
    """The request in the hands of a runtime that takes requests as they are: a `RequestExecution`."""

    def cancel(self) -> None:
        """Tell the runtime that nobody waits for the request any more."""

    def close(self) -> None:
        """Let go of the request: it has its last response."""


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A job on its way through the queue and back to its reader."""

    job: InferenceJob
    channel: ResponseChannel
    context: RequestContext
    request_id: str = ""
    batch_size: int = 1
    """Its items in a batch, at least 1."""
    batch_key: Hashable = None
    """Only requests with equal keys share a batch."""
    priority: int = 0
    """As the request says; 0 for the default."""
    timeout_ns: int = 0
    """As the request says; 0 for none."""
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    given_up: bool = False
    """The reader left, or was told an error. Set by the event loop, read by the instance's thread too."""
    finished: bool = False
    """It has its last response or error, and nothing more is taken. Set by the event loop, read by the instance's
    thread too."""
    execution: OpenExecution | None = None
    """The execution by a runtime that takes requests as they are, from the first one on."""
    arrived_at: int = 0
    """Set by the queue, as all fields below. Nanoseconds of `time.monotonic_ns`, as all times here."""
    queued_at: int = 0
    """The last time that it was queued: one that is rescheduled is queued several times."""
    level: int = 0
    """Its level of priority."""
    queued: bool = False
    queue_deadline: int | None = None
    """Until when it may wait."""
    answer_deadline: int | None = None
    """Until when it must be answered; `answer_timer` runs out then."""
    answer_timer: asyncio.TimerHandle | None = None

    def finish(self) -> None:
        """Let go of what leads back here: nothing of the request's tensors waits for a collector of garbage."""
        self.finished = True
        self.channel.on_drained = None
        if self.execution is not None:
            self.execution.close()
            self.execution = None

    def give_up(self) -> None:
        self.given_up = True
        if self.channel.unread_slots is not None:
            self.channel.unread_slots.release()
        if self.execution is not None:
            self.execution.cancel()


def endless_requests(requests: Iterable[QueuedRequest]) -> list[RequestContext]:
    """The contexts of those that wait for their answers however long it takes."""
    return [
        request.context for request in requests if request.queue_deadline is None and request.answer_deadline is None
    ]


class RequestBatch(NamedTuple):
    """Requests that are executed together, in the order in which they are served. `delay_ns`: the time of all of them
    during which they only waited for others to join."""

    requests: Sequence[QueuedRequest]
    close_reason: CloseReason
    delay_ns: int = 0

    @property
    def size(self) -> int:
        return sum(request.batch_size for request in self.requests)
