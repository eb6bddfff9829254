"""The statistics of a model whose requests are answered by other models: its times are theirs together."""

import time
from collections.abc import Iterable, Iterator, Sequence

from ..core.metrics import Reading
from ..core.model import ModelConfig, ModelStats
from ..core.request import InferRequest
from ..core.request_context import ExecutionTimes, RequestContext
from ..core.statistics import VersionStatistics
from ..telemetry.model_metrics import (
    CloseReason,
    ExecutionTiming,
    FailureReason,
    LatencyMetrics,
    ModelMetrics,
    first_response_bounds,
)


class RequestCounts:
    """The counts of one version. `quantiles`: of the latency summaries, empty for no summaries."""

    def __init__(self, config: ModelConfig, quantiles: Sequence[float] = ()) -> None:
        self._batched = config.max_batch_size > 0
        self._decoupled = config.decoupled
        self._metrics = ModelMetrics(LatencyMetrics(quantiles, first_response_bounds(config.raw), config.decoupled))

    def stats(self, ready: bool) -> ModelStats:
        metrics = self._metrics
        cancelled = metrics.failures[FailureReason.CANCELED]
        return ModelStats(ready, metrics.success.count, metrics.failures.total() - cancelled, cancelled)

    def statistics(self) -> VersionStatistics:
        return self._metrics.statistics()

    def count(self, context: RequestContext) -> None:
        self._metrics.record_request_end(context)

    def readings(self) -> Iterator[Reading]:
        yield from self._metrics.readings(0)

    def record_first_response(self, started_at: int) -> None:
        """The first response of a stream that began then, by `time.monotonic_ns`."""
        if self._decoupled:
            self._metrics.latencies.record_first_response(time.monotonic_ns() - started_at)

    def record(
        self,
        request: InferRequest,
        context: RequestContext,
        executions: Iterable[ExecutionTimes],
        started_at: int,
        failure: FailureReason | None,
    ) -> None:
        """Count a request that has ended. `executions`: of the requests that were made for it; `started_at`: by
        `time.monotonic_ns`."""
        latency, executions = time.monotonic_ns() - started_at, list(executions)
        timing = ExecutionTiming(*(sum(part) for part in zip(*(each.spent for each in executions), strict=True)))
        queued = sum(each.begun - each.queued for each in executions)
        context.execution = ExecutionTimes(started_at, started_at, timing)
        if failure is not None:
            self._metrics.record_failure(failure, latency)
            return
        size = 1
        if self._batched and request.inputs:
            size = next(iter(request.inputs.values())).shape[0]
        self._metrics.record_execution(size, timing, CloseReason.ALONE, 0)
        self._metrics.record_success(size, latency, queued, timing)
