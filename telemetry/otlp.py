"""Makes the spans of ended requests, without texts, and sends them by OTLP over HTTP, in a thread. Imported only for
tracing. Names: https://opentelemetry.io/docs/specs/semconv/gen-ai/, and vLLM's where that has none."""

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple, TypeAlias

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.id_generator import RandomIdGenerator
from opentelemetry.trace import SpanKind, StatusCode, format_trace_id, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from ..core.request_context import Outcome, RequestContext, SequenceRecord
from .trace_settings import SpanSettings

Value: TypeAlias = str | bool | int | float | tuple[str, ...]
Attributes: TypeAlias = Mapping[str, Value]

_OPERATIONS = {"chat": "chat", "tokenize": "tokenize", "detokenize": "detokenize"}
_DEFAULT_OPERATION = "text_completion"
"""The operation of every other endpoint."""

_SERVER_ERRORS = (Outcome.ERROR, Outcome.TIMEOUT)
"""Outcomes that are the server's error; a refusal is the client's."""

_SAMPLING = {
    "max_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_k": "gen_ai.request.top_k",
    "top_p": "gen_ai.request.top_p",
    "seed": "gen_ai.request.seed",
}


class Span(NamedTuple):
    """A span, with times of `time.monotonic`. `is_error`: the server failed."""

    name: str
    start: float
    end: float
    attributes: Attributes = {}
    is_error: bool = False


def request_span(context: RequestContext) -> Span:
    """The span of a closed context, from its arrival to its end."""
    assert context.end is not None
    outcome, reason = context.end
    operation = _OPERATIONS.get(context.endpoint, _DEFAULT_OPERATION)
    names = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "charonia",
        "charonia.door": context.endpoint,
        "gen_ai.request.model": context.model,
        "gen_ai.request.id": context.id,
        "gen_ai.response.id": context.id,
        "charonia.tenant": context.tenant,
        "charonia.model.version": context.version,
        "charonia.outcome": outcome.value,
    }
    attributes: dict[str, Value] = {key: name for key, name in names.items() if name}
    if outcome in _SERVER_ERRORS or outcome is Outcome.REJECTED:
        attributes["error.type"] = reason or outcome.value
    if context.sequences:
        attributes.update(_sampling_attributes(context.sequences))
        attributes.update(_usage_attributes(context))
        attributes.update(_latency_attributes(context))
    name = f"{operation} {context.model}".rstrip()
    return Span(name, context.arrived_at, context.ended_at, attributes, outcome in _SERVER_ERRORS)


def phase_spans(context: RequestContext) -> Iterator[Span]:
    """The begun phases of each sequence of a request. A phase that was cut off lasts to the request's end."""
    several = len(context.sequences) > 1
    for index, sequence in enumerate(context.sequences):
        attributes: Attributes = {"charonia.choice": index} if several else {}
        names = ("tokenize", "queue", "prefill", "decode")
        times = (sequence.opened, sequence.submitted, sequence.begun, sequence.first, sequence.last)
        for name, (start, end) in zip(names, pairwise(times), strict=True):
            if start is not None:
                yield Span(name, start, context.ended_at if end is None else end, attributes)


def _sampling_attributes(sequences: list[SequenceRecord]) -> Iterator[tuple[str, Value]]:
    sampling = sequences[0].sampling
    for field, name in _SAMPLING.items():
        value = getattr(sampling, field)
        if value is not None:
            # Clients may ask for integers that no span can hold.
            yield name, value if abs(value) < 2**63 else float(value)
    if sampling.stop:
        yield "gen_ai.request.stop_sequences", sampling.stop
    choices = 1 + max(sequence.choice for sequence in sequences)
    yield "gen_ai.request.n", choices
    if choices > 1:
        yield "gen_ai.request.choice.count", choices


def _usage_attributes(context: RequestContext) -> Iterator[tuple[str, Value]]:
    summary = context.summary
    yield "gen_ai.usage.num_sequences", summary.choices
    yield "gen_ai.usage.output_tokens", summary.generated
    if summary.prompt is not None:
        yield "gen_ai.usage.input_tokens", summary.prompt
    if summary.cached is not None:
        yield "gen_ai.usage.cache_read.input_tokens", summary.cached
    reasons = tuple(record.finish_reason.value for record in context.sequences if record.finish_reason is not None)
    if reasons:
        yield "gen_ai.response.model", context.model
        yield "gen_ai.response.finish_reasons", reasons


def _latency_attributes(context: RequestContext) -> Iterator[tuple[str, Value]]:
    """Latencies in seconds, of those phases that ended."""
    submitted, begun, first, last = context.summary[-4:]
    periods = {
        "time_in_queue": (submitted, begun),
        "time_to_first_token": (context.arrived_at, first),
        "time_in_model_prefill": (begun, first),
        "time_in_model_decode": (first, last),
        "time_in_model_inference": (begun, last),
        "e2e": (context.arrived_at, context.ended_at),
    }
    for name, (start, end) in periods.items():
        if start is not None and end is not None:
            yield f"gen_ai.latency.{name}", end - start


log = logging.getLogger(__name__)

_CONTEXT_HEADERS = ("traceparent", "tracestate")
"""W3C Trace Context: a client that sends these has its trace continued here."""

_PROPAGATOR = TraceContextTextMapPropagator()

_FLUSH_SECONDS = 3.0
"""The most seconds that the last spans may take to be sent."""


class OtlpTracer:
    """Makes and sends the spans of each context that ended, in batches from another thread. Without `settings`,
    OpenTelemetry's own variables apply."""

    def __init__(self, endpoint: str, version: str, settings: SpanSettings | None = None) -> None:
        self._exporter: SpanExporter = _OutageReportingExporter(endpoint)
        if settings is None:
            resource = _resource_from_environment()
            processor = BatchSpanProcessor(self._exporter)
        else:
            resource = Resource.create(dict(settings.resource))
            queue_size = settings.bsp_max_queue_size
            delay = float(settings.bsp_schedule_delay)
            batch_size = min(settings.bsp_max_export_batch_size, queue_size)  # no more than may wait
            processor = BatchSpanProcessor(self._exporter, queue_size, delay, batch_size)
        self._ids = _ToldIds()
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False, id_generator=self._ids)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("charonia", version)
        self._failed = False

    def __call__(self, context: RequestContext) -> None:
        """Make the spans of a context, and set its trace id. Never raises."""
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
        """Make a request's span in `parent`, and in it those of its phases and of its model's requests."""
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
            for phase in phase_spans(context):
                start = _nanoseconds(phase.start + clock)
                end = _nanoseconds(phase.end + clock)
                self._tracer.start_span(phase.name, inside, attributes=phase.attributes, start_time=start).end(end)
            for child in context.children or ():
                self._make_spans(child, inside, SpanKind.INTERNAL)
            if whole.is_error:
                span.set_status(StatusCode.ERROR)
        span.end(_nanoseconds(whole.end + clock))

    def close(self) -> None:
        """Send the remaining spans, for a few seconds at most."""
        flushing = threading.Thread(target=self._provider.shutdown, name="tracing-flush", daemon=True)
        flushing.start()
        flushing.join(_FLUSH_SECONDS)
        if flushing.is_alive():
            log.warning("the last spans could not be sent in time")
            self._exporter.shutdown()


class _ToldIds(RandomIdGenerator):
    """Random ids, except for a span whose request already told its ids to others (`tracing.trace_context`)."""

    told: RequestContext | None = None

    def generate_span_id(self) -> int:
        span_id = "" if self.told is None else self.told.span_id
        return int(span_id, 16) if span_id else super().generate_span_id()

    def generate_trace_id(self) -> int:
        trace_id = "" if self.told is None else self.told.trace_id
        return int(trace_id, 16) if trace_id else super().generate_trace_id()


def _resource_from_environment() -> Resource:
    resource = Resource.create()
    # OTEL_SERVICE_NAME and OTEL_RESOURCE_ATTRIBUTES have the last word; without them the library makes a name up.
    if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):
        resource = resource.merge(Resource({SERVICE_NAME: "charonia"}))
    return resource


class _OutageReportingExporter(OTLPSpanExporter):
    """Reports an outage once, instead of once a batch."""

    def __init__(self, endpoint: str) -> None:
        super().__init__(endpoint)
        self._collector = endpoint
        self._failing = False
        logging.getLogger("opentelemetry.exporter.otlp").setLevel(logging.CRITICAL)

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        if result is SpanExportResult.SUCCESS:
            self._failing = False
        elif not self._failing:
            self._failing = True
            log.warning("spans cannot be sent to %s; they are lost until it answers", self._collector)
        return result


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("latin-1")


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
