"""What a classic model counts and times: v2's statistics, Triton's metrics, and why requests did not share a batch.

Plain numbers of one event loop. Times are nanoseconds; metrics are whole microseconds, each increment cut as Triton
does.
"""

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from ...core.metrics import End, Microseconds, Outcome, Reading, ended_readings
from ...core.request_context import Exchange
from ...core.statistics import BatchStatistics, Duration, InferenceStatistics, ResponseStatistics, Statistics
from .batch_execution import Timing
from .dynamic_batcher import Cause
from .latency_metrics import Latencies

_PLACES = 1024
"""Places of a stream that are booked apart: a stream has no end, memory has."""


class Failure(StrEnum):
    """Triton's reasons: refused for want of room or time; cancelled; the model's own; any other."""

    REJECTED = "REJECTED"
    CANCELED = "CANCELED"
    BACKEND = "BACKEND"
    OTHER = "OTHER"


@dataclass(slots=True)
class Sum:
    """How often, and how long in all."""

    count: int = 0
    ns: int = 0

    def add(self, ns: int) -> None:
        self.count += 1
        self.ns += ns

    def read(self) -> Duration:
        return Duration(self.count, self.ns)


@dataclass(slots=True)
class Computes:
    """The three parts of executions: how many there were, and nanoseconds of each part."""

    count: int = 0
    input: int = 0
    infer: int = 0
    output: int = 0

    def add(self, timing: Timing) -> None:
        self.count += 1
        self.input += timing.input
        self.infer += timing.infer
        self.output += timing.output

    def read(self) -> tuple[Duration, Duration, Duration]:
        return Duration(self.count, self.input), Duration(self.count, self.infer), Duration(self.count, self.output)


@dataclass(slots=True)
class Responses:
    """The responses in one place of a decoupled model's streams."""

    infer: Sum = field(default_factory=Sum)
    output: Sum = field(default_factory=Sum)
    success: Sum = field(default_factory=Sum)
    fail: Sum = field(default_factory=Sum)
    empty: Sum = field(default_factory=Sum)
    cancel: Sum = field(default_factory=Sum)

    def read(self) -> ResponseStatistics:
        sums = (self.infer, self.output, self.success, self.fail, self.empty, self.cancel)
        return ResponseStatistics(*(each.read() for each in sums))


@dataclass(slots=True)
class Account:
    """Of one model, from its load to its unload. `queued`: nanoseconds; `last`: seconds since the epoch."""

    latencies: Latencies = field(default_factory=Latencies)
    success: Sum = field(default_factory=Sum)
    fail: Sum = field(default_factory=Sum)
    queued: int = 0
    computes: Computes = field(default_factory=Computes)
    batches: dict[int, Computes] = field(default_factory=dict)
    responses: dict[int, Responses] = field(default_factory=dict)
    failures: Counter[Failure] = field(default_factory=Counter)
    alone: Counter[Cause] = field(default_factory=Counter)
    ended: Counter[End] = field(default_factory=Counter)
    spent: Microseconds = field(default_factory=Microseconds)
    inferences: int = 0
    executions: int = 0
    last: float = 0.0

    def execute(self, size: int, timing: Timing, cause: Cause, requests: int) -> None:
        """A batch of that many items and requests was executed."""
        self.executions += 1
        if size not in self.batches:
            self.batches[size] = Computes()
        self.batches[size].add(timing)
        if requests == 1:
            self.alone[cause] += 1

    def succeed(self, size: int, whole: int, queued: int, timing: Timing) -> None:
        """A request of that many items was answered, `whole` after it came."""
        self.inferences += size
        self.success.count += 1
        self.success.ns += whole
        self.queued += queued
        self.computes.add(timing)
        self.last = time.time()
        spent = self.spent
        spent.request += whole // 1000
        spent.queue += queued // 1000
        spent.compute_input += timing.input // 1000
        spent.compute_infer += timing.infer // 1000
        spent.compute_output += timing.output // 1000
        self.latencies.succeed(whole, queued, timing)

    def lose(self, reason: Failure, whole: int) -> None:
        """A request was not answered."""
        self.failures[reason] += 1
        self.fail.add(whole)

    def response(self, place: int) -> Responses:
        """Of the responses in that place of a stream; those far out share the last."""
        place = min(place, _PLACES - 1)
        if place not in self.responses:
            self.responses[place] = Responses()
        return self.responses[place]

    def count(self, exchange: Exchange) -> None:
        """A request of a door has ended that was for this model."""
        assert exchange.end is not None
        self.ended[exchange.end] += 1

    def statistics(self) -> Statistics:
        return Statistics(
            last_inference=int(self.last * 1000),
            inference_count=self.inferences,
            execution_count=self.executions,
            inference=self._inference(),
            batches=tuple(BatchStatistics(size, *parts.read()) for size, parts in sorted(self.batches.items())),
            responses={str(place): each.read() for place, each in sorted(self.responses.items())},
            explain={cause.value: self.alone[cause] for cause in Cause if self.alone[cause]},
        )

    def _inference(self) -> InferenceStatistics:
        queue = Duration(self.success.count, self.queued)
        return InferenceStatistics(self.success.read(), self.fail.read(), queue, *self.computes.read())

    def readings(self, pending: int) -> Iterator[Reading]:
        """`pending`: requests that wait."""
        yield from ended_readings({End(Outcome.DONE): 0} | self.ended)
        for cause in Cause:
            yield Reading("charonia_unbatched_requests_total", self.alone[cause], {"reason": cause.value})
        yield Reading("nv_inference_request_success", self.success.count)
        for reason in Failure:
            yield Reading("nv_inference_request_failure", self.failures[reason], {"reason": reason.value})
        yield Reading("nv_inference_count", self.inferences)
        yield Reading("nv_inference_exec_count", self.executions)
        yield from self.spent.readings()
        yield Reading("nv_inference_pending_request_count", pending)
        yield from self.latencies.readings()
