"""The way of responses and errors from executions back to the requests, each of which is counted.

Everything here belongs to the event loop's thread. Knows nothing of tensors.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ...core.errors import CharoniaError, ErrorCode
from ...core.request import InferResponse
from ...core.request_context import ExecutionTimes
from ...telemetry.model_metrics import NO_TIMING, ExecutionTiming, FailureReason, ModelMetrics
from .batch_execution import ExecutionResult
from .queued_request import QueuedRequest, RequestBatch

_REJECTION_REASONS = {ErrorCode.UNAVAILABLE: FailureReason.REJECTED, ErrorCode.CANCELLED: FailureReason.CANCELED}


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
    """Told by dispatchers the fate of requests. A request that was given up is already recorded, and gets nothing more.
    `batched`: the model's tensors have a batch dimension. `on_finished` is called with requests that have their last
    response or error."""

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
        requests, close_reason, delay_ns = done.batch
        started_at = done.started_at
        result = done.result
        if result.error is None and not counted:
            self._metrics.record_execution(self._recorded_size(done.batch), result.timing, close_reason, len(requests))
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
        [request] = done.batch.requests
        responses = done.result.responses
        timing = done.result.timing
        error = done.result.error
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
        """Count the instances that wait until a response is read: `change` more."""
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
