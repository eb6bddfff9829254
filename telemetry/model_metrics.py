"""The v2 statistics and Triton's metrics of one classic model or ensemble, and why requests did not share a batch. For
the event loop.

Times are nanoseconds; metrics are whole microseconds, truncated at each increment as Triton does. Sources:
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_statistics.md and
https://github.com/triton-inference-server/server/blob/main/docs/user_guide/metrics.md.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from ..core.errors import InvalidArgument
from ..core.metrics import (
    BatchStatistics,
    Histogram,
    InferenceStatistics,
    QuantileSummary,
    Reading,
    ResponseStatistics,
    StatisticDuration,
    TimeInState,
    VersionStatistics,
)
from ..core.model import RawConfig
from ..core.request_context import Outcome, RequestContext, RequestEnd
from .llm_metrics import FIRST_RESPONSE_BOUNDS, RequestDurations, ended_readings

_MAX_RESPONSE_INDEX = 1023
"""The last index of a stream with its own statistics, shared by all later responses."""

_FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
_SUMMARIES = ("request", "queue", "compute_input", "compute_infer", "compute_output")


class ExecutionTiming(NamedTuple):
    """Nanoseconds of gathering the inputs, computing, and splitting the outputs."""

    input: int = 0
    infer: int = 0
    output: int = 0


NO_TIMING = ExecutionTiming()


class CloseReason(StrEnum):
    """Why a batch took no more requests; the `reason` of charonia_unbatched_requests_total."""

    ALONE = "model_does_not_batch"
    FULL = "batch_full"
    PREFERRED = "preferred_size"
    DIFFERS = "shapes_differ"
    DELAY = "delay_too_short"
    IDLE = "instance_idle"


class FailureReason(StrEnum):
    """Triton's `reason` of nv_inference_request_failure: no room or time, cancelled, the model's error, any other."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


@dataclass(slots=True)
class DurationSum:
    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def total(self) -> StatisticDuration:
        return StatisticDuration(self.count, self.ns)


@dataclass(slots=True)
class ComputeSums:
    """The number of executions and the nanoseconds of their three parts."""

    count: int = 0
    input: int = 0
    infer: int = 0
    output: int = 0

    def add(self, timing: ExecutionTiming) -> None:
        self.count += 1
        self.input += timing.input
        self.infer += timing.infer
        self.output += timing.output

    def totals(self) -> list[StatisticDuration]:
        return [StatisticDuration(self.count, ns) for ns in (self.input, self.infer, self.output)]


ResponseSums: TypeAlias = defaultdict[str, DurationSum]
"""The responses at one index of a decoupled model's streams, by the fields of `ResponseStatistics`."""


class LatencyMetrics:
    """Triton's summaries of latencies at `quantiles`, if any, and the histogram of the time to a request's first
    response, with `bounds` in milliseconds."""

    def __init__(
        self, quantiles: Sequence[float] = (), bounds: Sequence[float] = FIRST_RESPONSE_BOUNDS, decoupled: bool = False
    ) -> None:
        self._summaries = [QuantileSummary(quantiles) for _ in _SUMMARIES] if quantiles else []
        self._first_response = Histogram(bounds)
        self.decoupled = decoupled
        """Whether first responses are recorded by themselves; an ensemble's steps may change that."""

    def record_success(self, latency: int, queued: int, timing: ExecutionTiming) -> None:
        if self._summaries:
            for summary, ns in zip(self._summaries, (latency, queued, *timing), strict=True):
                summary.observe(ns // 1000)
        if not self.decoupled:
            self._first_response.observe(latency / 1e6)

    def record_first_response(self, latency: int) -> None:
        """Record a decoupled model's first response; for other models the answer is recorded."""
        self._first_response.observe(latency / 1e6)

    def readings(self) -> Iterator[Reading]:
        for part, summary in zip(_SUMMARIES, self._summaries, strict=False):
            yield Reading(f"nv_inference_{part}_summary_us", summary)
        yield Reading(_FIRST_RESPONSE, self._first_response)


def first_response_bounds(raw: RawConfig) -> tuple[float, ...]:
    """The histogram's bounds in milliseconds, from the config's `model_metrics` or Triton's. Raises `InvalidArgument`
    if they do not rise."""
    for control in raw.get("model_metrics", {}).get("metric_control", ()):
        if control.get("metric_identifier", {}).get("family") == _FIRST_RESPONSE:
            bounds = tuple(map(float, control.get("histogram_options", {}).get("buckets", ())))
            if bounds and all(low < high for low, high in pairwise(bounds)):
                return bounds
            message = f"the buckets of {_FIRST_RESPONSE} must be numbers that rise, got {list(bounds)}"
            raise InvalidArgument(message, field="model_metrics.metric_control.histogram_options.buckets")
    return FIRST_RESPONSE_BOUNDS


@dataclass(slots=True)
class ModelMetrics:
    """The counters of one model, from its load to its unload."""

    latencies: LatencyMetrics = field(default_factory=LatencyMetrics)
    success: DurationSum = field(default_factory=DurationSum)
    fail: DurationSum = field(default_factory=DurationSum)
    queue: DurationSum = field(default_factory=DurationSum)
    compute: ComputeSums = field(default_factory=ComputeSums)
    compute_by_batch_size: dict[int, ComputeSums] = field(default_factory=lambda: defaultdict(ComputeSums))
    responses_by_index: dict[int, ResponseSums] = field(
        default_factory=lambda: defaultdict(partial(defaultdict, DurationSum))
    )
    failures: Counter[FailureReason] = field(default_factory=Counter)
    batches: Counter[CloseReason] = field(default_factory=Counter)
    single_request_batches: Counter[CloseReason] = field(default_factory=Counter)
    ended_requests: Counter[RequestEnd] = field(default_factory=Counter)
    inferences: int = 0
    executions: int = 0
    execution_ns: int = 0
    batch_delay_ns: int = 0
    """Nanoseconds that requests waited for others to join them while an instance was free."""
    reader_wait: TimeInState = field(default_factory=TimeInState)
    last_inference_at: float = 0.0
    """Seconds since the epoch."""

    def record_execution(self, size: int, timing: ExecutionTiming, reason: CloseReason, requests: int) -> None:
        """Record the execution of a batch of `size` items of so many requests; `reason`: why it took no more."""
        self.executions += 1
        self.execution_ns += timing.input + timing.infer + timing.output
        self.compute_by_batch_size[size].add(timing)
        if requests:
            self.batches[reason] += 1
        if requests == 1:
            self.single_request_batches[reason] += 1

    def record_success(self, size: int, latency: int, queued: int, timing: ExecutionTiming) -> None:
        """Record the answer to a request of `size` items after `latency` ns, of which it was `queued` for a part."""
        self.inferences += size
        self.success.add(latency)
        self.queue.add(queued)
        self.compute.add(timing)
        self.last_inference_at = time.time()
        self.latencies.record_success(latency, queued, timing)

    def record_failure(self, reason: FailureReason, latency: int) -> None:
        self.failures[reason] += 1
        self.fail.add(latency)

    def response_sums(self, index: int) -> ResponseSums:
        """The sums for the response at that index of a stream."""
        return self.responses_by_index[min(index, _MAX_RESPONSE_INDEX)]

    def record_request_end(self, context: RequestContext) -> None:
        """Record the end of a client's request that named this model."""
        assert context.end is not None
        self.ended_requests[context.end] += 1

    def statistics(self) -> VersionStatistics:
        requests = (durations.total() for durations in (self.success, self.fail, self.queue))
        alone = self.single_request_batches
        return VersionStatistics(
            last_inference=int(self.last_inference_at * 1000),
            inference_count=self.inferences,
            execution_count=self.executions,
            inference=InferenceStatistics(*requests, *self.compute.totals()),
            batches=tuple(
                BatchStatistics(size, *sums.totals()) for size, sums in sorted(self.compute_by_batch_size.items())
            ),
            responses={
                str(index): ResponseStatistics(**{name: durations.total() for name, durations in sums.items()})
                for index, sums in sorted(self.responses_by_index.items())
            },
            explain={reason.value: alone[reason] for reason in CloseReason if alone[reason]},
        )

    def readings(self, pending: int) -> Iterator[Reading]:
        """All series for a scrape; `pending` requests wait."""
        yield from ended_readings({RequestEnd(Outcome.DONE): 0} | self.ended_requests)
        for reason in CloseReason:
            alone = self.single_request_batches[reason]
            yield Reading("charonia_unbatched_requests_total", alone, {"reason": reason.value})
            yield Reading("charonia_batches_total", self.batches[reason], {"reason": reason.value})
        yield Reading("charonia_batch_delay_seconds_total", self.batch_delay_ns / 1e9)
        yield Reading("charonia_execution_seconds_total", self.execution_ns / 1e9)
        yield Reading("charonia_reader_wait_seconds_total", self.reader_wait.seconds)
        yield Reading("nv_inference_request_success", self.success.count)
        for failure in FailureReason:
            yield Reading("nv_inference_request_failure", self.failures[failure], {"reason": failure.value})
        yield Reading("nv_inference_count", self.inferences)
        yield Reading("nv_inference_exec_count", self.executions)
        sums = self.success.ns, self.queue.ns, self.compute.input, self.compute.infer, self.compute.output
        yield from RequestDurations(*(ns // 1000 for ns in sums)).readings()
        yield Reading("nv_inference_pending_request_count", pending)
        yield from self.latencies.readings()
