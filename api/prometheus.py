"""Metrics in Prometheus's text format: a collector of what models measured, and the responses to scrapes."""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..core.metrics import Histogram, Labels, Measurement, MetricFamily, QuantileSummary, Reading
from ..telemetry.custom_metrics import CustomMetrics
from ..telemetry.metric_families import (
    CHARONIA_FAMILIES,
    PICKER_FAMILIES,
    TRITON_FAMILIES,
    VLLM_FAMILIES,
    vllm_readings,
)

_CONTENT_TYPE = "text/plain; charset=utf-8"

MetricsSource = Callable[[], Iterable[Measurement]]
"""A function that returns the measurements of a model, or of something else, at each scrape."""


class MetricRegistries(NamedTuple):
    """`shown`: what /metrics collects, None where it is not served; `whole`: all that is measured of models and of the
    frontend, for explanations."""

    shown: CollectorRegistry | None = None
    whole: CollectorRegistry | None = None


NO_METRICS = MetricRegistries()


def build_registry(
    sources: Iterable[MetricsSource],
    vllm: bool = False,
    hidden: Collection[str] = (),
    custom: CustomMetrics | None = None,
    extensions: Iterable[MetricFamily] = (),
) -> CollectorRegistry:
    """A registry that collects from `sources`, and the `custom` metrics that models make, but for `hidden` families;
    with `vllm` under all of vLLM's names, too, and else under those that pickers read. `extensions`: families that are
    not the server's own."""
    shown = [family for family in (*CHARONIA_FAMILIES, *extensions, *TRITON_FAMILIES) if family.name not in hidden]
    registry = CollectorRegistry()
    registry.register(PrometheusCollector(tuple(sources), shown, vllm, custom or CustomMetrics()))
    return registry


class PrometheusCollector(Collector):
    """Collects the families, of those that are `shown`, of which a source has a reading; a series ends with the model
    that it is of."""

    def __init__(
        self, sources: tuple[MetricsSource, ...], shown: Sequence[MetricFamily], vllm: bool, custom: CustomMetrics
    ) -> None:
        self._sources = sources
        self._custom = custom
        self._vllm = vllm
        self._shown = shown

    def collect(self) -> Iterator[Metric]:
        ours = _families(self._shown)
        theirs = _families(VLLM_FAMILIES if self._vllm else PICKER_FAMILIES)
        for source in self._sources:
            for labels, readings in source():
                _fill(ours, labels, readings)
                _fill(theirs, {**labels, "model_name": labels.get("model", "")}, vllm_readings(readings))
        yield from (metric for metric in (*ours.values(), *theirs.values()) if metric.samples)
        for family, readings in self._custom.readings():
            metrics = _families([family])
            _fill(metrics, {}, readings)
            yield metrics[family.name]


_PYTHON_STYLE = ("charonia_", "vllm:")
"""Beginnings of the names of histograms whose bounds are written with a point, as vLLM's are; Triton's, and those of
its models, are whole numbers where they can be."""


def _families(families: Iterable[tuple[str, str, str]]) -> dict[str, Metric]:
    return {name: Metric(name, text, kind) for name, kind, text in families}


def _fill(metrics: Mapping[str, Metric], labels: Labels, readings: Iterable[Reading]) -> None:
    for reading in readings:
        metric = metrics.get(reading.family)
        if metric is not None:
            _add(metric, {**labels, **reading.labels}, reading.value)


def _add(metric: Metric, labels: dict[str, str], value: float | Histogram | QuantileSummary) -> None:
    # To Prometheus an empty label is no label. In Triton's text they are sorted, and le and quantile come last.
    labels = {name: text for name, text in sorted(labels.items()) if text}
    if not isinstance(value, Histogram | QuantileSummary):
        metric.add_sample(metric.name, labels, value)
        return
    if isinstance(value, Histogram):
        count = 0
        for bound, within in zip((*value.bounds, float("inf")), value.counts, strict=True):
            count += within
            text = _number(float(bound))
            if not metric.name.startswith(_PYTHON_STYLE):
                text = text.removesuffix(".0")
            metric.add_sample(f"{metric.name}_bucket", {**labels, "le": text}, count)
    else:
        count = value.count
        for quantile, number in zip(value.quantiles, value.values(), strict=True):
            metric.add_sample(metric.name, {**labels, "quantile": repr(quantile)}, number)
    metric.add_sample(f"{metric.name}_sum", labels, value.sum)
    metric.add_sample(f"{metric.name}_count", labels, count)


def render_exposition(metrics: Iterable[Metric]) -> bytes:
    """The metrics in Prometheus's text format, each under its own name. prometheus_client's writer would add `_total`
    to the names of counters, which Triton's do not have."""
    lines: list[str] = []
    for metric in metrics:
        lines.append(f"# HELP {metric.name} {_escaped(metric.documentation)}")
        lines.append(f"# TYPE {metric.name} {metric.type}")
        for sample in metric.samples:
            labels = ",".join(f'{name}="{_escaped(text, quoted=True)}"' for name, text in sample.labels.items())
            lines.append(f"{sample.name}{'{' + labels + '}' if labels else ''} {_number(sample.value)}")
    return "".join(f"{line}\n" for line in lines).encode()


def _escaped(text: str, quoted: bool = False) -> str:
    text = text.replace("\\", r"\\").replace("\n", r"\n")
    return text.replace('"', r"\"") if quoted else text


def _number(value: float) -> str:
    # Counts stay whole numbers, however large.
    if value != value:
        return "NaN"
    return "+Inf" if value == float("inf") else repr(value)


def metrics_response(registry: CollectorRegistry) -> Response:
    """The response to a scrape of `registry`."""
    return Response(render_exposition(registry.collect()), headers={"content-type": _CONTENT_TYPE})


def metrics_app(registry: CollectorRegistry) -> ASGIApp:
    """The application of the metrics port: `/metrics`, and as on Triton's an empty response to all other paths."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = Response(headers={"content-type": _CONTENT_TYPE})
        if scope["method"] != "GET":
            response = Response(status_code=405, headers={"allow": "GET"})
        elif scope["path"] in ("/metrics", "/metrics/"):
            response = metrics_response(registry)
        await response(scope, receive, send)

    return app
