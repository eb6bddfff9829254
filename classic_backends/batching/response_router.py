"""What becomes of requests: their responses go to whoever reads them, and are booked."""

import time
from dataclasses import dataclass

from ...core.errors import CharoniaError, ErrorCode
from ...core.request_context import ExecutionTimes
from .batch_execution import NO_TIMING, ExecutionTiming
from .dispatcher import BatchResult, JobBatch, QueuedJob
from .model_metrics import FailureReason, ModelMetrics

_REASONS = {ErrorCode.UNAVAILABLE: FailureReason.REJECTED, ErrorCode.CANCELLED: FailureReason.CANCELED}
"""Of what was not executed."""


@dataclass(slots=True)
class _StreamProgress:
    """The responses of one request so far: how many, and what they took."""

    count: int = 0
    timing: ExecutionTiming = NO_TIMING
    failed: bool = False


class ResponseRouter:
    """A `DispatchListener`. A request that gave up was booked when it did."""

    def __init__(self, account: ModelMetrics, batched: bool) -> None:
        self._account = account
        self._batched = batched
        self._streams: dict[QueuedJob, _StreamProgress] = {}

    def on_batch_done(self, done: BatchResult) -> None:
        (requests, cause), begun, result = done.batch, done.started_at, done.result
        if result.error is None:
            self._account.record_execution(self._size(done.batch), result.timing, cause, len(requests))
        now = time.monotonic_ns()
        for index, request in enumerate(requests):
            if request.item.given_up:
                continue
            _note(request, begun, result.timing)
            if result.error is not None:
                self._fail(request, result.error, FailureReason.BACKEND)
                continue
            self._account.record_success(
                request.batch_size, now - request.arrived_at, begun - request.arrived_at, result.timing
            )
            request.item.sink.put(result.responses[index])
            request.item.sink.end()

    def on_stream_response(self, done: BatchResult) -> None:
        [request], result = done.batch.requests, done.result
        stream = self._streams.setdefault(request, _StreamProgress())
        booked = self._account.response_sums(stream.count)
        if not stream.count:
            self._account.latencies.record_first_response(time.monotonic_ns() - request.arrived_at)
        stream.count += 1
        if request.item.given_up:
            return booked.cancel.add(0)
        if result.error is not None:
            stream.failed = True
            booked.fail.add(result.timing.infer)
            return self._fail(request, result.error, FailureReason.BACKEND)
        booked.infer.add(result.timing.infer)
        booked.output.add(result.timing.output)
        booked.success.add(result.timing.infer + result.timing.output)
        stream.timing = ExecutionTiming(*map(sum, zip(stream.timing, result.timing, strict=True)))
        _note(request, done.started_at, stream.timing)
        return request.item.sink.put(result.responses[0])

    def on_stream_end(self, work: JobBatch, begun: int) -> None:
        [request] = work.requests
        stream = self._streams.pop(request, _StreamProgress())
        if stream.failed or request.item.given_up:
            return
        # Triton's backends say that they are done with one more response, which is empty.
        self._account.response_sums(stream.count).empty.add(0)
        now = time.monotonic_ns()
        self._account.record_execution(self._size(work), stream.timing, work.close_reason, 1)
        self._account.record_success(
            request.batch_size, now - request.arrived_at, begun - request.arrived_at, stream.timing
        )
        request.item.sink.end()

    def on_rejected(self, request: QueuedJob, error: Exception) -> None:
        code = error.code if isinstance(error, CharoniaError) else ErrorCode.INTERNAL
        self._fail(request, error, _REASONS.get(code, FailureReason.OTHER))

    def _fail(self, request: QueuedJob, error: Exception, reason: FailureReason) -> None:
        self._account.record_failure(reason, time.monotonic_ns() - request.arrived_at)
        request.item.sink.end(error)

    def _size(self, work: JobBatch) -> int:
        """Triton books a model that does not batch under the size 1."""
        return work.size if self._batched else 1


def _note(request: QueuedJob, begun: int, timing: ExecutionTiming) -> None:
    """For traces: when what happened to it."""
    if request.item.context is not None:
        request.item.context.execution = ExecutionTimes(request.arrived_at, begun, timing)
