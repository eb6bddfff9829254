"""The requests whose spans are sent, and where to. Without an endpoint OpenTelemetry is not imported, and requests cost
nothing."""

import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import SplitResult, urlsplit

from ..core.errors import InvalidArgument
from ..core.request_context import RequestContext
from .request_trace import request_trace
from .trace_settings import OPENTELEMETRY_MODE, TIMESTAMPS, SpanSettings, TraceControl

if TYPE_CHECKING:
    from .otlp import OtlpTracer

_FLAG = "--otlp-traces-endpoint"
_TRACES_VARIABLE = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
_ALL_VARIABLE = "OTEL_EXPORTER_OTLP_ENDPOINT"
_PROTOCOL_VARIABLES = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PATH = "/v1/traces"
_PARENT_HEADERS = ("traceparent", b"traceparent")
"""The header that continues a client's trace, over gRPC and HTTP."""

_TRACEPARENT = re.compile(
    r"(?!ff)[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-([0-9a-f]{2})(-.*)?", re.ASCII
)


class SamplingTracer:
    """Passes on the requests that `traces` samples, and those whose clients send a trace context: tritonserver's mode
    opentelemetry, whose settings do not change."""

    def __init__(self, tracer: Callable[[RequestContext], None], traces: TraceControl) -> None:
        self._tracer = tracer
        self._traces = traces
        self._level = TIMESTAMPS in traces.settings().trace_level

    def __call__(self, context: RequestContext) -> None:
        if context.parent is not None:
            return
        picked = request_trace(context, self._traces) is not None
        self._traces.open_traces -= picked
        if picked or (self._level and any(name in _PARENT_HEADERS for name, _ in context.headers)):
            self._tracer(context)


def trace_context(context: RequestContext, traces: TraceControl) -> str | None:
    """The W3C trace context of a running request, as JSON of its headers, for spans that others make within the
    request's own; None if it leaves no span. Its ids are chosen now."""
    if not traces.sends_spans:
        return None
    root = context
    while root.parent is not None:
        root = root.parent
    header = next((value for name, value in root.headers if name in _PARENT_HEADERS), b"")
    client = _TRACEPARENT.fullmatch(header if isinstance(header, str) else header.decode("latin-1"))
    if client is None and traces.settings().spans is not None and request_trace(root, traces) is None:
        return None
    context.trace_id = root.trace_id = client[1] if client is not None else root.trace_id or os.urandom(16).hex()
    context.span_id = context.span_id or os.urandom(8).hex()
    flags = "01" if client is None else client[2]
    return json.dumps({"traceparent": f"00-{context.trace_id}-{context.span_id}-{flags}"})


def otlp_endpoint(flag: str, environment: Mapping[str, str], settings: SpanSettings | None = None) -> str:
    """The URL that spans go to, or "": from tritonserver's mode opentelemetry, the flag, or OpenTelemetry's own
    variables.

    Raises:
        InvalidArgument: it is no HTTP URL, is given twice, or the variables ask for another protocol.
    """
    if flag and settings is not None:
        raise InvalidArgument(f"{_FLAG} and --trace-config mode={OPENTELEMETRY_MODE} both say where spans go")
    if settings is not None:
        _checked_url(f"--trace-config {OPENTELEMETRY_MODE},url", settings.url)
        return settings.url
    if flag:
        path = _checked_url(_FLAG, flag).path.strip("/")
        return flag if path else flag.rstrip("/") + _PATH
    disabled = environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
    if disabled or environment.get("OTEL_TRACES_EXPORTER", "").lower() == "none":
        return ""
    name = next((name for name in (_TRACES_VARIABLE, _ALL_VARIABLE) if environment.get(name)), "")
    if not name:
        return ""
    variable = next((name for name in _PROTOCOL_VARIABLES if environment.get(name)), "")
    if variable and environment[variable] != "http/protobuf":
        raise InvalidArgument(f"{variable} is {environment[variable]}: spans are sent by http/protobuf only")
    _checked_url(name, environment[name])
    return environment[name] if name == _TRACES_VARIABLE else environment[name].rstrip("/") + _PATH


def _checked_url(name: str, url: str) -> SplitResult:
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InvalidArgument(f"{name} must be an HTTP URL such as http://localhost:4318{_PATH}, got {url!r}")
    return parts


@contextmanager
def open_tracer(endpoint: str, version: str, settings: SpanSettings | None = None) -> Iterator["OtlpTracer | None"]:
    """A tracer for the block, which sends its last spans at the end; None without an endpoint.

    Raises:
        InvalidArgument: OpenTelemetry is not installed, or its own environment variables are wrong.
    """
    if not endpoint:
        yield None
        return
    try:
        from .otlp import OtlpTracer
    except ImportError as error:
        message = f"tracing to {endpoint} needs OpenTelemetry ({error.name}): pip install '.[otel]'"
        raise InvalidArgument(message) from None
    try:
        tracer = OtlpTracer(endpoint, version, settings)
    except ValueError as error:
        raise InvalidArgument(f"OpenTelemetry's environment variables are wrong: {error}") from None
    try:
        yield tracer
    finally:
        tracer.close()
