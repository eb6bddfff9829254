"""A language model's counters as v2's statistics."""

from charonia.core.metrics import BatchStatistics, InferenceStatistics, StatisticDuration, VersionStatistics
from charonia.core.request_context import Outcome, RequestEnd
from charonia.telemetry.llm_metrics import LlmMetrics, v2_statistics


def test_nothing_happened_yet() -> None:
    assert v2_statistics(LlmMetrics()) == VersionStatistics()


def test_answered_and_failed_requests() -> None:
    metrics = LlmMetrics()
    metrics.ended[RequestEnd(Outcome.STOP)] = 2
    for outcome in (Outcome.CANCELLED, Outcome.ERROR, Outcome.TIMEOUT):
        metrics.ended[RequestEnd(outcome)] = 1
    metrics.ended[RequestEnd(Outcome.REJECTED, "not_found")] = 4
    spent = metrics.durations
    spent.request, spent.queue, spent.compute_input, spent.compute_infer, spent.compute_output = 15, 1, 2, 8, 4
    spent.last = 77
    computed = StatisticDuration(2, 2000), StatisticDuration(2, 8000), StatisticDuration(2, 4000)
    inference = InferenceStatistics(
        StatisticDuration(2, 15000), StatisticDuration(7, 0), StatisticDuration(2, 1000), *computed
    )
    assert v2_statistics(metrics) == VersionStatistics(77, 2, 2, inference, (BatchStatistics(1, *computed),))
