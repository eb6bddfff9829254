"""A language model's counters as v2's statistics."""

from charonia.core.metrics import End, LlmMetrics, Outcome
from charonia.core.statistics import BatchStatistics, Duration, InferenceStatistics, Statistics
from charonia.engine.frontend.v2_statistics import statistics_of


def test_nothing_happened_yet() -> None:
    assert statistics_of(LlmMetrics()) == Statistics()


def test_answered_and_failed_requests() -> None:
    metrics = LlmMetrics()
    metrics.ended[End(Outcome.STOP)] = 2
    for outcome in (Outcome.CANCELLED, Outcome.ERROR, Outcome.TIMEOUT):
        metrics.ended[End(outcome)] = 1
    metrics.ended[End(Outcome.REJECTED, "not_found")] = 4
    spent = metrics.durations
    spent.request, spent.queue, spent.compute_input, spent.compute_infer, spent.compute_output = 15, 1, 2, 8, 4
    spent.last = 77
    computed = Duration(2, 2000), Duration(2, 8000), Duration(2, 4000)
    inference = InferenceStatistics(Duration(2, 15000), Duration(7, 0), Duration(2, 1000), *computed)
    assert statistics_of(metrics) == Statistics(77, 2, 2, inference, (BatchStatistics(1, *computed),))
