"""What is counted of an arm's requests while a rollout watches it."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from ...core.metrics import log_bucket, log_bucket_value
from ...core.request_context import Outcome, RequestContext, RequestEnd
from .guard import Latency

_ANSWERED = Outcome.DONE, Outcome.STOP, Outcome.LENGTH
_FAILED = Outcome.ERROR, Outcome.TIMEOUT
_AWAY = RequestEnd(Outcome.REJECTED, "unavailable")
"""The refusals that are the server's fault: 503."""


def is_failure(end: RequestEnd) -> bool:
    """Whether a request ended with a 5xx or a broken stream."""
    return end.outcome in _FAILED or end == _AWAY


def is_answer(end: RequestEnd) -> bool:
    return end.outcome in _ANSWERED


class LatencyCounts:
    """Milliseconds by `log_bucket`: memory does not grow with the traffic, and a quantile is right to a hundredth of
    its value."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: Counter[int] = Counter()

    def observe(self, milliseconds: float) -> None:
        self.counts[log_bucket(milliseconds)] += 1

    def above(self, milliseconds: float) -> int:
        """How many are in a higher bucket."""
        bucket = log_bucket(milliseconds)
        return sum(count for slower, count in self.counts.items() if slower > bucket)

    def quantile(self, quantile: float) -> float:
        """NaN of none. `quantile`: from 0 to 1."""
        rank = math.ceil(quantile * self.counts.total())
        seen = 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= rank:
                return log_bucket_value(bucket)
        return math.nan


class ArmSamples:
    """The requests of one arm in an interval that were answered or failed, and latencies of those that were answered.

    Refusals that are the client's fault, and requests that clients left, do not count.
    """

    __slots__ = ("_measured", "ended", "failed", "latencies")

    def __init__(self, latencies: Iterable[Latency]) -> None:
        self.ended = self.failed = 0
        self.latencies = {metric: LatencyCounts() for metric in latencies}
        self._measured = [(_SECONDS_OF[metric], counts) for metric, counts in self.latencies.items()]

    def observe(self, context: RequestContext) -> None:
        """Count a request that has ended."""
        end = context.end
        assert end is not None
        if end.outcome in _ANSWERED:
            self.ended += 1
            for seconds_of, counts in self._measured:
                seconds = seconds_of(context)
                if seconds is not None:
                    counts.observe(seconds * 1e3)
        elif is_failure(end):
            self.ended += 1
            self.failed += 1


def _request_seconds(context: RequestContext) -> float | None:
    return context.ended_at - context.arrived_at


def _first_token_seconds(context: RequestContext) -> float | None:
    first = context.summary.first
    return None if first is None else first - context.arrived_at


def _next_token_seconds(context: RequestContext) -> float | None:
    summary = context.summary
    gaps = summary.generated / (summary.choices or 1) - 1
    if summary.first is None or summary.last is None or gaps <= 0:
        return None
    return (summary.last - summary.first) / gaps


_SECONDS_OF: Mapping[Latency, Callable[[RequestContext], float | None]] = {
    Latency.REQUEST: _request_seconds,
    Latency.FIRST_TOKEN: _first_token_seconds,
    Latency.NEXT_TOKEN: _next_token_seconds,
}
