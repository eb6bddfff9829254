"""What a classic model measures of single requests: Triton's summaries, and the time to the first of many responses.

metrics.md section 3 of the reference.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

from ...core.errors import InvalidArgument
from ...core.metrics import FIRST_RESPONSE_BOUNDS, Histogram, Reading
from ...core.model import ConfigDocument
from ...core.summary import QuantileSummary
from .batch_execution import ExecutionTiming

_FIRST = "nv_inference_first_response_histogram_ms"
_PARTS = ("request", "queue", "compute_input", "compute_infer", "compute_output")


class LatencyMetrics:
    """`quantiles` of summaries, none for no summaries; `bounds` of the time to the first response in milliseconds.
    `decoupled`: the model says when it makes one; of others the answer is the first response."""

    def __init__(
        self, quantiles: Sequence[float] = (), bounds: Sequence[float] = FIRST_RESPONSE_BOUNDS, decoupled: bool = False
    ) -> None:
        self._summaries = [QuantileSummary(quantiles) for _ in _PARTS] if quantiles else []
        self._first = Histogram(bounds)
        self._decoupled = decoupled

    def record_success(self, whole: int, queued: int, timing: ExecutionTiming) -> None:
        """A request was answered; nanoseconds."""
        if self._summaries:
            for summary, spent in zip(self._summaries, (whole, queued, *timing), strict=True):
                summary.observe(spent // 1000)
        if not self._decoupled:
            self._first.observe(whole / 1e6)

    def record_first_response(self, ns: int) -> None:
        """The first response to a request of a decoupled model came so long after it."""
        self._first.observe(ns / 1e6)

    def readings(self) -> Iterator[Reading]:
        for part, summary in zip(_PARTS, self._summaries, strict=False):
            yield Reading(f"nv_inference_{part}_summary_us", summary)
        yield Reading(_FIRST, self._first)


def first_response_bounds(document: ConfigDocument) -> tuple[float, ...]:
    """Triton's, unless the config's `model_metrics` has others.

    Raises:
        InvalidArgument: they do not rise.
    """
    for control in document.get("model_metrics", {}).get("metric_control", ()):
        if control.get("metric_identifier", {}).get("family") == _FIRST:
            return _rising(control.get("histogram_options", {}).get("buckets", ()))
    return FIRST_RESPONSE_BOUNDS


def _rising(buckets: Sequence[Any]) -> tuple[float, ...]:
    bounds = tuple(map(float, buckets))
    if not bounds or any(low >= high for low, high in pairwise(bounds)):
        message = f"the buckets of {_FIRST} must be numbers that rise, got {list(bounds)}"
        raise InvalidArgument(message, field="model_metrics.metric_control.histogram_options.buckets")
    return bounds
