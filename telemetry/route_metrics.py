"""The instruments of a route's requests that one version serves: how they ended, and how long they took. They are
counted with the model too, see `llm_metrics.py` and `model_metrics.py`."""

import time
from collections.abc import Iterator

from ..core.metrics import Histogram, InferenceStatistics, Reading, StatisticDuration, VersionStatistics
from ..core.request_context import Outcome, RequestContext, RequestEnd
from .llm_metrics import LATENCY_BOUNDS

_ANSWERED = frozenset((Outcome.STOP, Outcome.LENGTH, Outcome.DONE))


class _EndCount:
    """The requests that ended in one way. Kept beside the end, since hashing an end takes as long as the rest."""

    __slots__ = ("answered", "count")

    def __init__(self, outcome: Outcome) -> None:
        self.answered = outcome in _ANSWERED
        self.count = 0


class ArmMetrics:
    """Counts and latencies, in seconds; `_last` is when the last request was answered, since the epoch."""

    __slots__ = ("_ended", "_failed_seconds", "_first_token", "_last", "_request")

    def __init__(self) -> None:
        self._ended: dict[RequestEnd, _EndCount] = {}
        self._request = Histogram(LATENCY_BOUNDS)
        self._first_token = Histogram(LATENCY_BOUNDS)
        self._failed_seconds = self._last = 0.0

    def count(self, end: RequestEnd, context: RequestContext) -> None:
        """Count a request that ended so; latencies are of answered ones."""
        ended = self._ended.get(end)
        if ended is None:
            ended = self._ended[end] = _EndCount(end.outcome)
        ended.count += 1
        seconds = context.ended_at - context.arrived_at
        if not ended.answered:
            self._failed_seconds += seconds
            return
        self._request.observe(seconds)
        self._last = time.time()
        if context.sequences and (first := context.summary.first) is not None:
            self._first_token.observe(first - context.arrived_at)

    def readings(self, route: str) -> Iterator[Reading]:
        labels = {"route": route}
        for (outcome, reason), ended in self._ended.items():
            end_labels = {**labels, "outcome": outcome.value, "reason": reason}
            yield Reading("charonia_route_requests_total", ended.count, end_labels)
        yield Reading("charonia_route_request_seconds", self._request, labels)
        yield Reading("charonia_route_time_to_first_token_seconds", self._first_token, labels)

    def statistics(self) -> VersionStatistics:
        """The v2 statistics, without queueing and computing, which are the model's."""
        answered = sum(self._request.counts)
        success = StatisticDuration(answered, round(self._request.sum * 1e9))
        failed = sum(ended.count for ended in self._ended.values()) - answered
        fail = StatisticDuration(failed, round(self._failed_seconds * 1e9))
        return VersionStatistics(round(self._last * 1e3), answered, answered, InferenceStatistics(success, fail))
