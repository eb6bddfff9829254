"""A language model's counters in the words of v2's statistics, by the same rules as its `nv_inference_` metrics."""

from ...core.metrics import LlmMetrics, Outcome
from ...core.statistics import BatchStatistics, InferenceStatistics, StatisticDuration, VersionStatistics


def v2_statistics(metrics: LlmMetrics) -> VersionStatistics:
    """One request is one execution of batch size 1, as in Triton's own decoupled back ends. How long failed requests
    took is not measured."""
    answered, spent = metrics.answered, metrics.durations

    def took(microseconds: int) -> StatisticDuration:
        return StatisticDuration(answered, microseconds * 1000)

    computed = took(spent.compute_input), took(spent.compute_infer), took(spent.compute_output)
    failed = metrics.total(Outcome.ERROR, Outcome.REJECTED, Outcome.TIMEOUT, Outcome.CANCELLED)
    return VersionStatistics(
        last_inference=spent.last,
        inference_count=answered,
        execution_count=answered,
        inference=InferenceStatistics(took(spent.request), StatisticDuration(failed), took(spent.queue), *computed),
        batches=(BatchStatistics(1, *computed),) if answered else (),
    )
