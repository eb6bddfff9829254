"""Whether requests are traced, and where to; what spans an context has, without any collector."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from charonia.core.errors import InvalidArgument, QueueFull, Unsupported
from charonia.core.request import FinishReason
from charonia.core.request_context import Outcome, RequestContext, RequestEnd
from charonia.core.sampling import SamplingParams
from charonia.telemetry.otlp import phase_spans, request_span
from charonia.telemetry.trace_settings import SpanSettings, TraceControl, parse_trace_config
from charonia.telemetry.tracing import SamplingTracer, open_tracer, otlp_endpoint

ALL, TRACES = "OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
PROTOCOL = "OTEL_EXPORTER_OTLP_PROTOCOL"


@pytest.mark.parametrize(
    ("flag", "environment", "endpoint"),
    [
        ("", {}, ""),
        ("http://c:4318", {}, "http://c:4318/v1/traces"),
        ("http://c:4318/mine", {ALL: "http://other"}, "http://c:4318/mine"),
        ("", {ALL: "http://c:4318/"}, "http://c:4318/v1/traces"),
        ("", {TRACES: "https://c/t", ALL: "http://other"}, "https://c/t"),
        ("", {ALL: "http://c", "OTEL_SDK_DISABLED": "true"}, ""),
        ("", {ALL: "http://c", "OTEL_TRACES_EXPORTER": "none"}, ""),
        (
            "",
            {ALL: "http://c", PROTOCOL: "grpc", "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"},
            "http://c/v1/traces",
        ),
    ],
)
def test_where_spans_go(flag: str, environment: dict[str, str], endpoint: str) -> None:
    assert otlp_endpoint(flag, environment) == endpoint


@pytest.mark.parametrize(
    ("flag", "environment", "complaint"),
    [
        ("c:4317", {}, "--otlp-traces-endpoint must be an HTTP URL"),
        ("http://[", {}, "--otlp-traces-endpoint must be an HTTP URL"),
        ("", {ALL: "grpc://c:4317"}, f"{ALL} must be an HTTP URL"),
        ("", {TRACES: "http://"}, f"{TRACES} must be an HTTP URL"),
        ("", {ALL: "http://c", PROTOCOL: "grpc"}, f"{PROTOCOL} is grpc"),
    ],
)
def test_where_they_cannot_go(flag: str, environment: dict[str, str], complaint: str) -> None:
    with pytest.raises(InvalidArgument, match=complaint):
        otlp_endpoint(flag, environment)


def test_tritons_mode_says_where_spans_go_and_it_alone() -> None:
    told = SpanSettings("http://c:4318/t")
    assert otlp_endpoint("", {ALL: "http://other"}, told) == "http://c:4318/t"
    with pytest.raises(InvalidArgument, match="--trace-config mode=opentelemetry both say where spans go"):
        otlp_endpoint("http://other", {}, told)
    with pytest.raises(InvalidArgument, match="--trace-config opentelemetry,url must be an HTTP URL"):
        otlp_endpoint("", {}, SpanSettings("http://"))
    with open_tracer(told.url, "1", SpanSettings(bsp_max_queue_size=10)) as tracer:
        assert tracer is not None, "a batch is no larger than the queue"


def test_in_tritons_mode_some_requests_are_traced_and_those_of_traced_clients() -> None:
    words = ["mode=opentelemetry", "level=TIMESTAMPS", "rate=2", "opentelemetry,resource=a=b"]
    traces = TraceControl(parse_trace_config(words))
    seen: list[RequestContext] = []
    sampled = SamplingTracer(seen.append, traces)
    for number in range(4):
        sampled(asked(str(number)))
    sampled(asked("theirs", (b"traceparent", b"00-1-2-01")))
    sampled(asked("of nobody", found=False))
    assert [context.id for context in seen] == ["1", "3", "theirs"]
    with pytest.raises(Unsupported, match="trace settings can not be updated in mode opentelemetry"):
        traces.update({"trace_rate": ["1"]})
    assert traces.settings("m").as_v2_texts() == {
        "trace_level": ("TIMESTAMPS",),
        "trace_rate": ("2",),
        "trace_count": ("-1",),
        "trace_mode": ("opentelemetry",),
        "url": ("http://localhost:4318/v1/traces",),
        "resource": ("service.name=triton-inference-server", "a=b"),
        "bsp_max_queue_size": ("2048",),
        "bsp_schedule_delay": ("5000",),
        "bsp_max_export_batch_size": ("512",),
    }


def asked(name: str, *headers: tuple[bytes, bytes], found: bool = True) -> RequestContext:
    context = RequestContext("infer", headers)
    context.id, context.model_found = name, found
    context.close()
    return context


def test_in_tritons_mode_nothing_is_traced_without_a_level() -> None:
    seen: list[RequestContext] = []
    sampled = SamplingTracer(seen.append, TraceControl(parse_trace_config(["mode=opentelemetry", "rate=1"])))
    sampled(asked("theirs", (b"traceparent", b"00-1-2-01")))
    assert seen == []


def test_without_an_endpoint_nothing_is_imported_and_without_the_library_that_is_said() -> None:
    code = """
import sys
import charonia.cli.serve
from charonia.core.errors import InvalidArgument
from charonia.telemetry.tracing import open_tracer
with open_tracer("", "1") as tracer:
    assert tracer is None
assert not any(name.startswith("opentelemetry") for name in sys.modules)
sys.modules["opentelemetry"] = None
try:
    with open_tracer("http://127.0.0.1:1/v1/traces", "1"):
        pass
except InvalidArgument as error:
    assert "pip install '.[otel]'" in error.message
    print("said")
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "said\n"


def test_wrong_variables_of_the_library_are_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "-1")
    with pytest.raises(InvalidArgument, match="OpenTelemetry's environment variables"), open_tracer("http://c/t", "1"):
        pass


def test_what_cannot_be_traced_hurts_nobody_and_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    never_closed = RequestContext("chat")
    with open_tracer("http://127.0.0.1:9/v1/traces", "1") as tracer:
        assert tracer is not None
        tracer(never_closed)
        tracer(never_closed)
    [record] = caplog.records
    assert "could not be traced" in record.getMessage()


def part(**fields: object) -> SimpleNamespace:
    """A sequence that went through everything."""
    whole = {
        "end": RequestEnd(Outcome.STOP),
        "choice": 0,
        "sampling": SamplingParams(max_tokens=8, temperature=0.5, seed=2**64 - 1, stop=("x",)),
        "opened": 1.0,
        "submitted": 2.0,
        "begun": 4.0,
        "first": 7.0,
        "last": 11.0,
        "prompt": 5,
        "cached": 2,
        "generated": 3,
        "finish_reason": FinishReason.STOP,
    }
    return SimpleNamespace(**whole | fields)


def closed(*parts: SimpleNamespace, error: Exception | None = None) -> RequestContext:
    context = RequestContext("chat")
    context.id, context.model, context.tenant, context.arrived_at = "chatcmpl-1", "m", "alice", 0.5
    context.sequences.extend(parts)
    if error is not None:
        context.fail(error)
    context.close()
    context.ended_at = 12.0
    return context


def test_an_answered_request() -> None:
    context = closed(part())
    whole = request_span(context)
    assert (whole.name, whole.start, whole.end, whole.is_error) == ("chat m", 0.5, 12.0, False)
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.request.model": "m",
        "gen_ai.response.model": "m",
        "gen_ai.request.id": "chatcmpl-1",
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.seed": float(2**64 - 1),
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 3,
        "gen_ai.usage.cache_read.input_tokens": 2,
        "gen_ai.response.finish_reasons": ("stop",),
        "gen_ai.latency.time_in_queue": 2.0,
        "gen_ai.latency.time_to_first_token": 6.5,
        "gen_ai.latency.time_in_model_prefill": 3.0,
        "gen_ai.latency.time_in_model_decode": 4.0,
        "gen_ai.latency.time_in_model_inference": 7.0,
        "gen_ai.latency.e2e": 11.5,
        "charonia.tenant": "alice",
    }
    assert expected.items() <= whole.attributes.items()
    assert "error.type" not in whole.attributes
    phases = [(span.name, span.start, span.end) for span in phase_spans(context)]
    assert phases == [("tokenize", 1, 2), ("queue", 2, 4), ("prefill", 4, 7), ("decode", 7, 11)]


def test_a_request_that_broke_off_in_the_queue() -> None:
    late = part(
        end=RequestEnd(Outcome.TIMEOUT), begun=None, first=None, last=None, cached=None, generated=0, finish_reason=None
    )
    context = closed(late)
    whole = request_span(context)
    assert whole.is_error
    assert whole.attributes["error.type"] == "timeout"
    assert "gen_ai.latency.time_in_queue" not in whole.attributes
    assert [(span.name, span.end) for span in phase_spans(context)] == [("tokenize", 2.0), ("queue", 12.0)]


def test_a_refusal_is_the_clients_and_has_no_phases() -> None:
    context = closed(error=QueueFull("full", retry_after=1))
    whole = request_span(context)
    assert not whole.is_error
    assert whole.attributes["error.type"] == "queue_full_requests"
    assert list(phase_spans(context)) == []


def test_several_answers_tell_their_phases_apart() -> None:
    context = closed(part(), part(choice=1))
    assert [span.attributes["charonia.choice"] for span in phase_spans(context)] == [0] * 4 + [1] * 4
    assert request_span(context).attributes["gen_ai.request.choice.count"] == 2
