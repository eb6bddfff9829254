"""The API's metrics: they are kept in the server."""

from __future__ import annotations

import sys

from .connection import server
from .messages import UpdateMetric
from .triton_error import TritonModelException


class Metric:
    """One series of a family: `increment` of counters and gauges, `set` of gauges, `observe` of histograms."""

    def __init__(self, family: MetricFamily, labels: dict[str, str] | None, buckets: list[float] | None) -> None:
        self._family = family
        texts = {str(name): str(value) for name, value in (labels or {}).items()}
        self._id: int = server().call("add_metric", family=family._name, labels=texts, buckets=buckets)

    def increment(self, value: float) -> None:
        self._require(MetricFamily.COUNTER, MetricFamily.GAUGE)
        if self._family._kind == MetricFamily.COUNTER and value < 0:
            raise TritonModelException("A counter cannot be incremented by a negative value.")
        self._update("increment", value)

    def set(self, value: float) -> None:
        self._require(MetricFamily.GAUGE)
        self._update("set", value)

    def observe(self, value: float) -> None:
        self._require(MetricFamily.HISTOGRAM)
        self._update("observe", value)

    def value(self) -> float:
        self._require(MetricFamily.COUNTER, MetricFamily.GAUGE)
        return float(server().call("metric_value", metric=self._id))

    def _require(self, *kinds: int) -> None:
        if self._family._kind not in kinds:
            operation = sys._getframe(1).f_code.co_name
            raise TritonModelException(f"A {_KINDS[self._family._kind]} has no operation '{operation}'.")

    def _update(self, operation: str, value: float) -> None:
        server().send(UpdateMetric(self._id, operation, float(value)))

    def __del__(self) -> None:
        if hasattr(self, "_id"):
            try:
                server().send(UpdateMetric(self._id, "remove", 0.0))
            except OSError:
                return  # the connection is closed, and this process ends


class MetricFamily:
    """Metrics of one name; `Metric` makes the series. Families of one name and kind are one, in all models."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2

    def __init__(self, name: str, description: str, kind: int) -> None:
        if kind not in _KINDS:
            raise TritonModelException(f"{kind} is no kind of metric")
        self._name, self._kind = name, kind
        server().call("add_metric_family", name=name, description=description, kind=_KINDS[kind])

    def Metric(self, labels: dict[str, str] | None = None, buckets: list[float] | None = None) -> Metric:
        return Metric(self, labels, buckets)


_KINDS = {MetricFamily.COUNTER: "counter", MetricFamily.GAUGE: "gauge", MetricFamily.HISTOGRAM: "histogram"}
