"""Sends the spans of ended requests to an OpenTelemetry collector, by OTLP over HTTP, from a thread of its own.

Imported only where requests are traced: OpenTelemetry may not be installed.
"""

import logging
import threading
import time
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanKind, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ..core.request_context import RequestContext
from .spans import phase_spans, request_span
from .trace_settings import SpanSettings

log = logging.getLogger(__name__)

_CONTEXT_HEADERS = ("traceparent", "tracestate")
"""W3C Trace Context: a client that sends these has its trace go on here."""

_PROPAGATOR = TraceContextTextMapPropagator()

_FLUSH_SECONDS = 3.0
"""How long spans that are still here may take to leave at the very end."""


class OtlpTracer:
    """Called with a context that ended, makes its spans; a batch of them leaves now and then, in another thread.
    Without `settings` OpenTelemetry's own variables say how."""

    def __init__(self, endpoint: str, version: str, settings: SpanSettings | None = None) -> None:
        self._exporter = _OutageReportingExporter(OTLPSpanExporter(endpoint), endpoint)
        if settings is None:
            resource, processor = _resource_from_environment(), BatchSpanProcessor(self._exporter)
        else:
            resource = Resource.create(dict(settings.resource))
            queue_size, delay = settings.bsp_max_queue_size, float(settings.bsp_schedule_delay)
            batch_size = min(settings.bsp_max_export_batch_size, queue_size)  # no more than may wait
            processor = BatchSpanProcessor(self._exporter, queue_size, delay, batch_size)
        self._ids = _ToldIds()
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False, id_generator=self._ids)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("charonia", version)
        self._failed = False

    def __call__(self, context: RequestContext) -> None:
        """Make its spans, and name its trace to the context. Never raises: no request suffers from its trace."""
        if context.traced_in_parent:
            return
        try:
            headers = ((_text(name), value) for name, value in context.headers)
            parent = _PROPAGATOR.extract({name: _text(value) for name, value in headers if name in _CONTEXT_HEADERS})
            self._make_spans(context, parent, SpanKind.SERVER)
        except Exception:
            if not self._failed:
                log.exception("a request could not be traced; further failures are not told")
            self._failed = True

    def _make_spans(self, context: RequestContext, parent: Context, kind: SpanKind) -> None:
        """The span of a request in `parent`, and in it those of its phases and of the requests that its model made."""
        clock = time.time() - time.monotonic()
        whole = request_span(context)
        self._ids.told = context
        span = self._tracer.start_span(
            whole.name, parent, kind, whole.attributes, start_time=_nanoseconds(whole.start + clock)
        )
        self._ids.told = None
        context.trace_id = format_trace_id(span.get_span_context().trace_id)
        if span.is_recording():
            inside = set_span_in_context(span)
            for each in phase_spans(context):
                start, end = _nanoseconds(each.start + clock), _nanoseconds(each.end + clock)
                self._tracer.start_span(each.name, inside, attributes=each.attributes, start_time=start).end(end)
            for child in context.children or ():
                self._make_spans(child, inside, SpanKind.INTERNAL)
            if whole.is_error:
                span.set_status(StatusCode.ERROR)
        span.end(_nanoseconds(whole.end + clock))

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        flushing = threading.Thread(target=self._provider.shutdown, name="tracing-flush", daemon=True)
        flushing.start()
        flushing.join(_FLUSH_SECONDS)
        if flushing.is_alive():
            log.warning("the last spans could not be sent in time")
            self._exporter.shutdown()


class _ToldIds(RandomIdGenerator):
    """Ids at random, but for the span of a request that has told them while it ran (`tracing.trace_context`)."""

    told: RequestContext | None = None

    def generate_span_id(self) -> int:
        told = "" if self.told is None else self.told.span_id
        return int(told, 16) if told else super().generate_span_id()

    def generate_trace_id(self) -> int:
        told = "" if self.told is None else self.told.trace_id
        return int(told, 16) if told else super().generate_trace_id()


def _resource_from_environment() -> Resource:
    resource = Resource.create()
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES have the last word; without them the library makes a name up.
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "charonia"}))
    return resource


class _OutageReportingExporter(SpanExporter):
    """Another exporter that tells of an outage once, instead of once a batch."""

    def __init__(self, exporter: SpanExporter, endpoint: str) -> None:
        self._exporter = exporter
        self._endpoint = endpoint
        self._failing = False
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = self._exporter.export(spans)
        if result is SpanExportResult.SUCCESS:
            self._failing = False
        elif not self._failing:
            self._failing = True
            log.warning("spans cannot be sent to %s; they are lost until it answers", self._endpoint)
        return result

    def shutdown(self) -> None:
        self._exporter.shutdown()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        return self._exporter.force_flush(timeout_millis)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
