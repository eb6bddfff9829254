"""One request of a classic model on its way: its tensors and sequence, the queue's fields, its batch, and the channel
by which the router brings its responses to its reader.

Channels and the router belong to the event loop's thread.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Self, TypeAlias

from numpy.typing import NDArray

from ...core.errors import CharoniaError, ErrorCode
from ...core.request import InferResponse, ParameterValue
from ...core.request_context import ExecutionTimes, RequestContext
from ...telemetry.model_metrics import NO_TIMING, CloseReason, ExecutionTiming, FailureReason, ModelMetrics

if TYPE_CHECKING:
    from .request_execution import RequestExecution

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
    execution: "RequestExecution | None" = None
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


def endless_requests(requests: Iterable[QueuedRequest]) -> list[RequestContext]:
    """The contexts of those that wait for their answers however long it takes."""
    return [each.context for each in requests if each.queue_deadline is None and each.answer_deadline is None]


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


_REJECTION_REASONS = {ErrorCode.UNAVAILABLE: FailureReason.REJECTED, ErrorCode.CANCELLED: FailureReason.CANCELED}


class RequestBatch(NamedTuple):
    """Requests that are executed together, in the order in which they are served. `delay_ns`: the time of all of them
    during which they only waited for others to join."""

    requests: Sequence[QueuedRequest]
    close_reason: CloseReason
    delay_ns: int = 0

    @property
    def size(self) -> int:
        return sum(request.batch_size for request in self.requests)


class ExecutionResult(NamedTuple):
    """One response or error for each request, None for one that is answered later; or an `error` for all of them."""

    responses: Sequence[InferResponse | Exception | None]
    timing: ExecutionTiming
    error: Exception | None = None


class BatchResult(NamedTuple):
    """One execution, or of a decoupled model the part of it up to one response; `started_at` in nanoseconds of
    `time.monotonic_ns`."""

    batch: RequestBatch
    started_at: int
    result: ExecutionResult


@dataclass(slots=True)
class _StreamProgress:
    """The responses to one request of a decoupled model so far: their number and their time."""

    count: int = 0
    timing: ExecutionTiming = NO_TIMING
    failed: bool = False


class ResponseRouter:
    """Told by dispatchers, in the event loop's thread, the fate of requests. A request that was given up is already
    recorded, and gets nothing more. `batched`: the model's tensors have a batch dimension. `on_finished` is called with
    requests that have their last response or error."""

    def __init__(
        self,
        metrics: ModelMetrics,
        batched: bool,
        on_finished: Callable[[Sequence[QueuedRequest]], None] = lambda requests: None,
    ) -> None:
        self._metrics = metrics
        self._batched = batched
        self._on_finished = on_finished
        self._streams: dict[QueuedRequest, _StreamProgress] = {}

    def on_batch_done(self, done: BatchResult, counted: bool = False) -> None:
        """The whole batch has its responses, or its error, but for requests that are answered later. `counted`: its
        execution is already."""
        (requests, reason, delay_ns), started_at, result = done.batch, done.started_at, done.result
        if result.error is None and not counted:
            self._metrics.record_execution(self._recorded_size(done.batch), result.timing, reason, len(requests))
            self._metrics.batch_delay_ns += delay_ns
        now = time.monotonic_ns()
        responses = result.responses if result.error is None else [result.error] * len(requests)
        answered = [pair for pair in zip(requests, responses, strict=True) if pair[1] is not None]
        for request, response in answered:
            if request.given_up or request.finished:
                continue
            arrived_at = request.arrived_at
            request.context.execution = ExecutionTimes(arrived_at, started_at, result.timing)
            if isinstance(response, Exception):
                self._fail(request, response, FailureReason.BACKEND)
                continue
            self._metrics.record_success(request.batch_size, now - arrived_at, started_at - arrived_at, result.timing)
            assert response is not None
            request.channel.put(response)
            request.channel.end()
        self.on_finished([request for request, _ in answered])

    def on_stream_response(self, done: BatchResult) -> None:
        """A decoupled model made one response, or failed."""
        [request], (responses, timing, error) = done.batch.requests, done.result
        stream = self._streams.setdefault(request, _StreamProgress())
        sums = self._metrics.response_sums(stream.count)
        if not stream.count:
            self._metrics.latencies.record_first_response(time.monotonic_ns() - request.arrived_at)
        stream.count += 1
        if request.given_up:
            sums["cancel"].add(0)
        elif error is not None:
            stream.failed = True
            sums["fail"].add(timing.infer)
            self._fail(request, error, FailureReason.BACKEND)
        else:
            sums["compute_infer"].add(timing.infer)
            sums["compute_output"].add(timing.output)
            sums["success"].add(timing.infer + timing.output)
            stream.timing = ExecutionTiming(*map(sum, zip(stream.timing, timing, strict=True)))
            request.context.execution = ExecutionTimes(request.arrived_at, done.started_at, stream.timing)
            [response] = responses
            assert isinstance(response, InferResponse)
            request.channel.put(response)

    def on_stream_end(self, batch: RequestBatch, started_at: int, counted: bool = False) -> None:
        """A decoupled model has made its last response. `counted`: its execution is already."""
        [request] = batch.requests
        stream = self._streams.get(request) or _StreamProgress()
        if not stream.failed and not request.given_up:
            # Triton's backends end a stream with one more response, which is empty.
            self._metrics.response_sums(stream.count)["empty_response"].add(0)
            latency = time.monotonic_ns() - request.arrived_at
            if not counted:
                self._metrics.record_execution(self._recorded_size(batch), stream.timing, batch.close_reason, 1)
            self._metrics.record_success(request.batch_size, latency, started_at - request.arrived_at, stream.timing)
            request.channel.end()
        self.on_finished([request])

    def on_reader_wait(self, change: int) -> None:
        """One instance more waits until a response is read, or fewer."""
        self._metrics.reader_wait.add(change)

    def on_rejected(self, request: QueuedRequest, error: Exception) -> None:
        """The request left the queue without being executed, or once more."""
        code = error.code if isinstance(error, CharoniaError) else ErrorCode.INTERNAL
        self._fail(request, error, _REJECTION_REASONS.get(code, FailureReason.OTHER))
        if request.execution is not None:
            request.execution.cancel()
        self.on_finished([request])

    def on_finished(self, requests: Sequence[QueuedRequest]) -> None:
        """Nothing more becomes of the requests: they have their last response or error, or were given up."""
        for request in requests:
            request.finish()
            self._streams.pop(request, None)
        self._on_finished(requests)

    def _fail(self, request: QueuedRequest, error: Exception, reason: FailureReason) -> None:
        self._metrics.record_failure(reason, time.monotonic_ns() - request.arrived_at)
        request.channel.end(error)

    def _recorded_size(self, batch: RequestBatch) -> int:
        """Triton records a model without batches under the size 1."""
        return batch.size if self._batched else 1
