"""What is counted of an arm's requests while a rollout watches it."""

import math
from collections import Counter
from collections.abc import Iterable

from ..core.metrics import log_bucket, log_bucket_value
from ..core.request_context import Outcome, RequestContext, RequestEnd
from .guard import Latency

_UNAVAILABLE = "unavailable"
"""The reason of the refusals that are the server's fault: 503."""


def is_failure(end: RequestEnd) -> bool:
    """Whether a request ended with a 5xx or a broken stream."""
    return end.outcome in (Outcome.ERROR, Outcome.TIMEOUT) or end == (Outcome.REJECTED, _UNAVAILABLE)


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
        return sum(count for each, count in self.counts.items() if each > bucket)

    def quantile(self, quantile: float) -> float:
        """NaN of none. `quantile`: from 0 to 1."""
        rank, seen = math.ceil(quantile * self.counts.total()), 0
        for bucket in sorted(self.counts):
            seen += self.counts[bucket]
            if seen >= rank:
                return log_bucket_value(bucket)
        return math.nan


class ArmSamples:
    """The requests of one arm in an interval that were answered or failed, and latencies of those that were answered.

    Refusals that are the client's fault, and requests that clients left, do not count.
    """

    __slots__ = ("ended", "failed", "latencies")

    def __init__(self, latencies: Iterable[Latency]) -> None:
        self.ended = self.failed = 0
        self.latencies = {each: LatencyCounts() for each in latencies}

    def observe(self, context: RequestContext) -> None:
        """Count a request that has ended."""
        end = context.end
        if end is None:
            return
        if is_failure(end):
            self.ended += 1
            self.failed += 1
        elif end.outcome.answered or end.outcome is Outcome.DONE:
            self.ended += 1
            for latency, counts in self.latencies.items():
                seconds = _seconds(context, latency)
                if seconds is not None:
                    counts.observe(seconds * 1e3)


def _seconds(context: RequestContext, latency: Latency) -> float | None:
    if latency is Latency.REQUEST:
        return context.ended_at - context.arrived_at
    summary = context.summary
    if summary.first is None or summary.last is None:
        return None
    if latency is Latency.FIRST_TOKEN:
        return summary.first - context.arrived_at
    gaps = summary.generated / summary.choices - 1
    return (summary.last - summary.first) / gaps if gaps > 0 else None
