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

    def answered(self, done: BatchResult) -> None:
        (requests, cause), begun, result = done.work, done.begun, done.result
        if result.error is None:
            self._account.execute(self._size(done.work), result.timing, cause, len(requests))
        now = time.monotonic_ns()
        for index, request in enumerate(requests):
            if request.item.given_up:
                continue
            _note(request, begun, result.timing)
            if result.error is not None:
                self._fail(request, result.error, FailureReason.BACKEND)
                continue
            self._account.succeed(request.size, now - request.arrived, begun - request.arrived, result.timing)
            request.item.sink.put(result.responses[index])
            request.item.sink.end()

    def streamed(self, done: BatchResult) -> None:
        [request], result = done.work.requests, done.result
        stream = self._streams.setdefault(request, _StreamProgress())
        booked = self._account.response(stream.count)
        if not stream.count:
            self._account.latencies.respond(time.monotonic_ns() - request.arrived)
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
        _note(request, done.begun, stream.timing)
        return request.item.sink.put(result.responses[0])

    def ended(self, work: JobBatch, begun: int) -> None:
        [request] = work.requests
        stream = self._streams.pop(request, _StreamProgress())
        if stream.failed or request.item.given_up:
            return
        # Triton's backends say that they are done with one more response, which is empty.
        self._account.response(stream.count).empty.add(0)
        now = time.monotonic_ns()
        self._account.execute(self._size(work), stream.timing, work.cause, 1)
        self._account.succeed(request.size, now - request.arrived, begun - request.arrived, stream.timing)
        request.item.sink.end()

    def refused(self, request: QueuedJob, error: Exception) -> None:
        code = error.code if isinstance(error, CharoniaError) else ErrorCode.INTERNAL
        self._fail(request, error, _REASONS.get(code, FailureReason.OTHER))

    def _fail(self, request: QueuedJob, error: Exception, reason: FailureReason) -> None:
        self._account.lose(reason, time.monotonic_ns() - request.arrived)
        request.item.sink.end(error)

    def _size(self, work: JobBatch) -> int:
        """Triton books a model that does not batch under the size 1."""
        return work.size if self._batched else 1


def _note(request: QueuedJob, begun: int, timing: ExecutionTiming) -> None:
    """For traces: when what happened to it."""
    if request.item.exchange is not None:
        request.item.exchange.computed = ExecutionTimes(request.arrived, begun, timing)
