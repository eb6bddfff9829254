"""Latencies of single requests: which are kept, and the bounds that a config sets."""

from typing import Any

import pytest

from charonia.core.errors import InvalidArgument
from charonia.core.metrics import Histogram, QuantileSummary
from charonia.telemetry.model_metrics import ExecutionTiming, LatencyMetrics, first_response_bounds

FIRST = "nv_inference_first_response_histogram_ms"


def metrics(family: str, *buckets: float) -> dict[str, Any]:
    control = {"metric_identifier": {"family": family}, "histogram_options": {"buckets": list(buckets)}}
    return {"model_metrics": {"metric_control": [control]}}


def test_bounds_are_tritons_or_the_configs() -> None:
    assert first_response_bounds({}) == (100, 500, 2000, 5000)
    assert first_response_bounds(metrics("nv_another", 7)) == (100, 500, 2000, 5000)
    assert first_response_bounds(metrics(FIRST, 1, 2.5)) == (1, 2.5)


@pytest.mark.parametrize("buckets", [(), (2, 1), (1, 1)])
def test_bounds_that_do_not_rise_are_refused(buckets: tuple[float, ...]) -> None:
    with pytest.raises(InvalidArgument, match=f"the buckets of {FIRST} must be numbers that rise") as caught:
        first_response_bounds(metrics(FIRST, *buckets))
    assert caught.value.field == "model_metrics.metric_control.histogram_options.buckets"


@pytest.mark.parametrize("decoupled", [False, True])
def test_every_model_has_a_first_response(decoupled: bool) -> None:
    latencies = LatencyMetrics(decoupled=decoupled)
    latencies.record_success(150_000_000, 1, ExecutionTiming(1, 1, 1))
    if decoupled:
        latencies.record_first_response(50_000_000)
    [first] = (reading.value for reading in latencies.readings())
    assert isinstance(first, Histogram)
    assert first.counts == ([1, 0, 0, 0, 0] if decoupled else [0, 1, 0, 0, 0])


def test_times_are_cut_to_microseconds_and_milliseconds() -> None:
    latencies = LatencyMetrics((0.5,), (1, 10), decoupled=True)
    latencies.record_success(9_999, 1_000, ExecutionTiming(2_000, 3_500, 4_000))
    latencies.record_first_response(9_900_000)
    *summaries, first = (reading.value for reading in latencies.readings())
    assert [summary.sum for summary in summaries if isinstance(summary, QuantileSummary)] == [9, 1, 2, 3, 4]
    assert isinstance(first, Histogram)
    assert (first.counts, first.sum) == ([0, 1, 0], 9.9)
