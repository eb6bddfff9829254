"""What a classic model counts and times: v2's statistics, Triton's metrics, and why requests did not share a batch.

Plain numbers of one event loop. Times are nanoseconds; metrics are whole microseconds, each increment cut as Triton
does.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from ...core.metrics import Outcome, Reading, RequestDurations, RequestEnd, ended_readings
from ...core.request_context import RequestContext
from ...core.statistics import (
    BatchStatistics,
    InferenceStatistics,
    ResponseStatistics,
    StatisticDuration,
    VersionStatistics,
)
from .batch_execution import ExecutionTiming
from .dynamic_batcher import CloseReason
from .latency_metrics import LatencyMetrics

_PLACES = 1024
"""Places of a stream that are booked apart: a stream has no end, memory has."""


class FailureReason(StrEnum):
    """Triton's reasons: refused for want of room or time; cancelled; the model's own; any other."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


@dataclass(slots=True)
class DurationSum:
    """How often, and how long in all."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def as_duration(self) -> StatisticDuration:
        return StatisticDuration(self.count, self.ns)


@dataclass(slots=True)
class ComputeSums:
    """The three parts of executions: how many there were, and nanoseconds of each part."""

    count: int = 0
    input: int = 0
    infer: int = 0
    output: int = 0

    def add(self, timing: ExecutionTiming) -> None:
        self.count += 1
        self.input += timing.input
        self.infer += timing.infer
        self.output += timing.output

    def as_durations(self) -> tuple[StatisticDuration, StatisticDuration, StatisticDuration]:
        return (
            StatisticDuration(self.count, self.input),
            StatisticDuration(self.count, self.infer),
            StatisticDuration(self.count, self.output),
        )


@dataclass(slots=True)
class ResponseSums:
    """The responses in one place of a decoupled model's streams."""

    infer: DurationSum = field(default_factory=DurationSum)
    output: DurationSum = field(default_factory=DurationSum)
    success: DurationSum = field(default_factory=DurationSum)
    fail: DurationSum = field(default_factory=DurationSum)
    empty: DurationSum = field(default_factory=DurationSum)
    cancel: DurationSum = field(default_factory=DurationSum)

    def as_statistics(self) -> ResponseStatistics:
        sums = (self.infer, self.output, self.success, self.fail, self.empty, self.cancel)
        return ResponseStatistics(*(each.as_duration() for each in sums))


@dataclass(slots=True)
class ModelMetrics:
    """Of one model, from its load to its unload. `queued`: nanoseconds; `last`: seconds since the epoch."""

    latencies: LatencyMetrics = field(default_factory=LatencyMetrics)
    success: DurationSum = field(default_factory=DurationSum)
    fail: DurationSum = field(default_factory=DurationSum)
    queued_ns: int = 0
    compute: ComputeSums = field(default_factory=ComputeSums)
    compute_by_batch_size: dict[int, ComputeSums] = field(default_factory=dict)
    responses_by_index: dict[int, ResponseSums] = field(default_factory=dict)
    failures: Counter[FailureReason] = field(default_factory=Counter)
    single_request_batches: Counter[CloseReason] = field(default_factory=Counter)
    ended_requests: Counter[RequestEnd] = field(default_factory=Counter)
    duration_totals: RequestDurations = field(default_factory=RequestDurations)
    inferences: int = 0
    executions: int = 0
    last_inference_at: float = 0.0

    def record_execution(self, size: int, timing: ExecutionTiming, cause: CloseReason, requests: int) -> None:
        """A batch of that many items and requests was executed."""
        self.executions += 1
        if size not in self.compute_by_batch_size:
            self.compute_by_batch_size[size] = ComputeSums()
        self.compute_by_batch_size[size].add(timing)
        if requests == 1:
            self.single_request_batches[cause] += 1

    def record_success(self, size: int, whole: int, queued: int, timing: ExecutionTiming) -> None:
        """A request of that many items was answered, `whole` after it came."""
        self.inferences += size
        self.success.count += 1
        self.success.ns += whole
        self.queued_ns += queued
        self.compute.add(timing)
        self.last_inference_at = time.time()
        spent = self.duration_totals
        spent.request += whole // 1000
        spent.queue += queued // 1000
        spent.compute_input += timing.input // 1000
        spent.compute_infer += timing.infer // 1000
        spent.compute_output += timing.output // 1000
        self.latencies.record_success(whole, queued, timing)

    def record_failure(self, reason: FailureReason, whole: int) -> None:
        """A request was not answered."""
        self.failures[reason] += 1
        self.fail.add(whole)

    def response_sums(self, place: int) -> ResponseSums:
        """Of the responses in that place of a stream; those far out share the last."""
        place = min(place, _PLACES - 1)
        if place not in self.responses_by_index:
            self.responses_by_index[place] = ResponseSums()
        return self.responses_by_index[place]

    def record_request_end(self, exchange: RequestContext) -> None:
        """A request of a door has ended that was for this model."""
        assert exchange.end is not None
        self.ended_requests[exchange.end] += 1

    def statistics(self) -> VersionStatistics:
        return VersionStatistics(
            last_inference=int(self.last_inference_at * 1000),
            inference_count=self.inferences,
            execution_count=self.executions,
            inference=self._inference(),
            batches=tuple(
                BatchStatistics(size, *parts.as_durations())
                for size, parts in sorted(self.compute_by_batch_size.items())
            ),
            responses={str(place): each.as_statistics() for place, each in sorted(self.responses_by_index.items())},
            explain={
                cause.value: self.single_request_batches[cause]
                for cause in CloseReason
                if self.single_request_batches[cause]
            },
        )

    def _inference(self) -> InferenceStatistics:
        queue = StatisticDuration(self.success.count, self.queued_ns)
        return InferenceStatistics(
            self.success.as_duration(), self.fail.as_duration(), queue, *self.compute.as_durations()
        )

    def readings(self, pending: int) -> Iterator[Reading]:
        """`pending`: requests that wait."""
        yield from ended_readings({RequestEnd(Outcome.DONE): 0} | self.ended_requests)
        for cause in CloseReason:
            yield Reading(
                "charonia_unbatched_requests_total", self.single_request_batches[cause], {"reason": cause.value}
            )
        yield Reading("nv_inference_request_success", self.success.count)
        for reason in FailureReason:
            yield Reading("nv_inference_request_failure", self.failures[reason], {"reason": reason.value})
        yield Reading("nv_inference_count", self.inferences)
        yield Reading("nv_inference_exec_count", self.executions)
        yield from self.duration_totals.readings()
        yield Reading("nv_inference_pending_request_count", pending)
        yield from self.latencies.readings()
