"""One request of a classic model: its tensors, its sequence, and the channel that brings its responses to its reader.

Channels belong to the event loop's thread.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, Self, TypeAlias

from numpy.typing import NDArray

from ...core.request import InferResponse, ParameterValue
from ...core.request_context import RequestContext

_MAX_UNREAD = 256

SequenceId: TypeAlias = int | str


class SequenceFlags(NamedTuple):
    """The parameters of a request that place it in its sequence. `start`: it is the first; `end`: it is the last."""

    id: SequenceId
    start: bool = False
    end: bool = False


@dataclass(slots=True, eq=False)
class SequenceContext:
    """One open sequence, as its instance sees it. `row`: its row in the batches of a model with fixed rows, set before
    its first request is handed over. `states`: state tensors that its last request left, by the input that takes them
    next; only the instance's thread touches them while a request of the sequence runs."""

    id: SequenceId
    row: int = 0
    states: Mapping[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class InferenceJob:
    """The inputs of one request in the model's shapes, and its requested outputs (None: all). For stateful models,
    `sequence_flags` as the request gave them, and `sequence` once it is known; without it, the job is an idle row of a
    batch."""

    inputs: Mapping[str, NDArray[Any]]
    requested_outputs: Sequence[str] | None = None
    sequence_flags: SequenceFlags | None = None
    sequence: SequenceContext | None = None

    @property
    def batch_size(self) -> int:
        """The number of its items in a batch, at least 1."""
        return len(next(iter(self.inputs.values()))) if self.inputs else 1


class ResponseChannel:
    """The responses of one request, which a task reads one by one. `ended`: no more of them come, though the reader may
    not have read all.

    `unread_slots`: a decoupled model takes one for each response, the reader gives it back; an instance that finds none
    waits. `held`: earlier requests of its `orderer`, if it has one, have not ended, so nothing can be read yet.
    `on_drained`: called once, when half of what may wait does.
    """

    def __init__(self, decoupled: bool) -> None:
        self._loop = asyncio.get_running_loop()
        self.unread_slots = threading.Semaphore(_MAX_UNREAD) if decoupled else None
        self._responses: deque[InferResponse] = deque()
        self.ended = self.held = False
        self._error: Exception | None = None
        self._reader: asyncio.Future[None] | None = None
        self.orderer: ResponseOrderer | None = None
        self.on_drained: Callable[[], None] | None = None

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
        self.ended, self._error = True, error
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
        channel.orderer, channel.held = self, True
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


class ExecutionHandle(Protocol):
    """What a runtime that takes requests as they are has of one."""

    def cancel(self) -> None:
        """Nobody waits for the request any more. Called in the event loop."""

    def close(self) -> None:
        """Nothing more becomes of the request. Called in the event loop, last."""


@dataclass(slots=True, eq=False)
class QueuedRequest:
    """A job on its way through the queue and back to its reader.

    `batch_size`: its items in a batch, at least 1; only requests with equal `batch_key` share a batch. `priority` and
    `timeout_ns` as the request asked, 0 for neither. `given_up`: the reader left or was told an error; `finished`: it
    has its last response or error, and nothing more is taken; both are set by the event loop, and read by the
    instance's thread. `parameters`: the request's. `execution`: of a runtime that takes requests, from the first time
    on. The queue sets the fields from `arrived_at` to `queued`: a request that is rescheduled is `queued_at` several
    times. `answer_timer` runs out at `answer_deadline`.
    """

    job: InferenceJob
    channel: ResponseChannel
    context: RequestContext
    request_id: str = ""
    batch_size: int = 1
    batch_key: Hashable = None
    priority: int = 0
    timeout_ns: int = 0
    given_up: bool = False
    finished: bool = False
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    execution: ExecutionHandle | None = None
    arrived_at: int = 0
    queued_at: int = 0
    level: int = 0
    queue_deadline: int | None = None
    answer_deadline: int | None = None
    queued: bool = False
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


class SingleResponseStream:
    """The stream of one response, which `make` computes when it is asked for. An async generator would cost as much
    again as a small execution."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable[[], Coroutine[Any, Any, InferResponse]]) -> None:
        self._make: Callable[[], Coroutine[Any, Any, InferResponse]] | None = make

    def __aiter__(self) -> Self:
        return self

    def __anext__(self) -> Coroutine[Any, Any, InferResponse]:
        make, self._make = self._make, None
        return _stop_iteration() if make is None else make()

    async def aclose(self) -> None:
        self._make = None


async def _stop_iteration() -> InferResponse:
    raise StopAsyncIteration
