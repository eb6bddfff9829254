"""A real server, a real OTLP receiver: the spans of a request and its one record, wherever the request ended."""

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

FLAGS = ["--executor", "fake", "--fake-vocab-size", "384", "--served-model-name", "m", "--log-format", "json"]
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"
KEY = {"authorization": "Bearer k"}


class Collector:
    """What an OTLP receiver was sent."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.services: set[str] = set()
        self.url = ""

    def take(self, body: bytes) -> None:
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.services |= {
                attribute.value.string_value
                for attribute in resource.resource.attributes
                if attribute.key == "service.name"
            }
            self.spans += [span for scope in resource.scope_spans for span in scope.spans]

    def children(self, parent: Span) -> list[Span]:
        spans = [span for span in self.spans if span.parent_span_id == parent.span_id]
        return sorted(spans, key=lambda span: span.start_time_unix_nano)


@pytest.fixture
def collector() -> Iterator[Collector]:
    taken = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            taken.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200 if self.path == "/v1/traces" else 404)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    taken.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield taken
    server.shutdown()
    thread.join()
    server.server_close()


def attributes(span: Span) -> dict[str, Any]:
    return {
        attribute.key: getattr(attribute.value, attribute.value.WhichOneof("value")) for attribute in span.attributes
    }


def records(said: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    return [line for line in lines if line["logger"] == "charonia.requests"]


def ask_for_everything(server: Any) -> None:
    """One streamed completion of two answers with a trace of its own, and refusals of every kind."""
    body = {"model": "m", "prompt": [5, 6, 7], "max_tokens": 4, "n": 2, "stream": True}
    url, sent = f"{server.url}/v1/completions", KEY | {"traceparent": TRACEPARENT}
    with httpx.stream("POST", url, json=body, headers=sent, timeout=60) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")
    assert httpx.post(url, json=body | {"model": "nope"}, headers=KEY).status_code == 404
    assert httpx.post(url, content=b"{", headers=KEY).status_code == 400
    assert httpx.post(url, json=body).status_code == 401
    assert httpx.post(f"{server.url}/v2/models/m/generate", content=b"[", headers=KEY).status_code == 400
    tokens = httpx.post(f"{server.url}/tokenize", json={"model": "m", "prompt": "hi"}, headers=KEY)
    assert tokens.status_code == 200
    assert httpx.get(f"{server.url}/v1/models", headers=KEY).status_code == 200
    ask_over_grpc(server)


def ask_over_grpc(server: Any) -> None:
    metadata = (("authorization", "Bearer k"), ("traceparent", TRACEPARENT))
    ids = {"name": "input_ids", "datatype": "INT32", "shape": [1], "contents": {"int_contents": [9]}}
    asked = pb.ModelInferRequest(model_name="m", id="over-grpc", inputs=[ids])
    asked.parameters["max_tokens"].int64_param = 2
    with grpc.insecure_channel(server.grpc_address) as channel:
        GRPCInferenceServiceStub(channel).ModelInfer(asked, metadata=metadata, timeout=60)


TENANTS = {
    ("completions", "m", "length", ""): "alice",
    ("completions", "nope", "rejected", "not_found"): "alice",
    ("completions", "", "rejected", "invalid_argument"): "alice",
    ("completions", "", "rejected", "unauthenticated"): "",
    ("generate", "m", "rejected", "invalid_argument"): "alice",
    ("tokenize", "m", "done", ""): "alice",
    ("ModelInfer", "m", "length", ""): "alice",
}
"""Whose each request was, by how it ended: records follow answers, and those of several frontends come as they come."""

COUNTED = {
    f"charonia_requests_total{{{labels}}} {count}"
    for labels, count in [
        ('model="m",outcome="length",version="1"', 2),
        ('model="m",outcome="done",version="1"', 1),
        ('model="m",outcome="rejected",reason="invalid_argument",version="1"', 1),
        ('outcome="rejected",reason="not_found"', 1),
        ('outcome="rejected",reason="invalid_argument"', 1),
        ('outcome="rejected",reason="unauthenticated"', 1),
    ]
}


@pytest.mark.parametrize("frontends", ["1", "2"])
def test_one_record_and_one_trace_for_every_request(
    frontends: str, serve: Any, tokenizer_only: Path, collector: Collector
) -> None:
    flags = [*FLAGS, "--api-key", "alice:k", "--otlp-traces-endpoint", collector.url, "--frontends", frontends]
    flags += ["--log-requests", "all"]
    with serve(str(tokenizer_only), *flags) as server:
        ask_for_everything(server)
        server.until(lambda: {*httpx.get(server.metrics_url).text.splitlines()} >= COUNTED)  # some count late
        assert server.stop() == 0
        told = records(server.said)
    by_end = {tuple(record.get(key, "") for key in ("door", "model", "outcome", "reason")): record for record in told}
    assert len(told) == len(TENANTS)
    assert {end: record.get("tenant", "") for end, record in by_end.items()} == TENANTS
    assert {record["client"] for record in told} == {"127.0.0.1"}
    streamed, over_grpc = by_end["completions", "m", "length", ""], by_end["ModelInfer", "m", "length", ""]
    assert (streamed["choices"], streamed["prompt_tokens"], streamed["generated_tokens"]) == (2, 3, 8)
    assert (streamed["trace_id"], over_grpc["trace_id"], over_grpc["request_id"]) == (TRACE, TRACE, "over-grpc")
    assert_spans(collector, [record["trace_id"] for record in told])


def assert_spans(collector: Collector, traces: list[str]) -> None:
    assert collector.services == {"charonia"}
    roots = [span for span in collector.spans if span.kind == Span.SPAN_KIND_SERVER]
    assert sorted(span.trace_id.hex() for span in roots) == sorted(traces)
    [whole] = [span for span in roots if attributes(span)["charonia.door"] == "completions" and span.parent_span_id]
    assert (whole.name, whole.parent_span_id.hex()) == ("text_completion m", PARENT)
    told = attributes(whole)
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (3, 8)
    assert told["gen_ai.request.model"] == "m"
    phases = collector.children(whole)
    assert sorted(span.name for span in phases) == sorted(["tokenize", "queue", "prefill", "decode"] * 2)
    for span in phases:
        assert span.trace_id == whole.trace_id
        assert whole.start_time_unix_nano <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= whole.end_time_unix_nano
    refused = [span for span in roots if "error.type" in attributes(span)]
    assert len(refused) == 4
    assert all(span.status.code == Status.STATUS_CODE_UNSET and not collector.children(span) for span in refused)


def test_a_collector_that_is_gone_hurts_nobody_and_is_told_once(
    serve: Any, tokenizer_only: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [*FLAGS[:-2], "--otlp-traces-endpoint", "http://127.0.0.1:9/v1/traces"]
    for name, value in (("OTEL_BSP_SCHEDULE_DELAY", "50"), ("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")):
        monkeypatch.setenv(name, value)
    with serve(str(tokenizer_only), *flags) as server:
        url, body = f"{server.url}/v2/models/m/generate", {"input_ids": [1], "max_tokens": 2}
        assert httpx.post(url, json=body).status_code == 200
        server.until(lambda: "spans cannot be sent" in server.said)
        for _ in range(3):
            assert httpx.post(url, json=body).status_code == 200
        assert server.stop() == 0
        assert server.said.count("spans cannot be sent to http://127.0.0.1:9/v1/traces") == 1
        assert "Traceback" not in server.said
        assert "Failed to export" not in server.said


def test_an_endpoint_that_cannot_be_is_refused_at_start(serve: Callable[..., Any], tokenizer_only: Path) -> None:
    with serve(str(tokenizer_only), *FLAGS, "--otlp-traces-endpoint", "collector:4317") as server:
        assert server.process.wait(60) == 1
        assert "--otlp-traces-endpoint must be an HTTP URL" in server.said


def test_tritons_mode_opentelemetry(serve: Any, tmp_path: Path, collector: Collector) -> None:
    (tmp_path / "r" / "m.identity" / "1").mkdir(parents=True)
    tensors = "".join(f'{side} {{ name: "X" data_type: TYPE_FP32 dims: 1 }}' for side in ("input", "output"))
    (tmp_path / "r" / "m.identity" / "config.pbtxt").write_text(tensors)
    words = ["mode=opentelemetry", "level=TIMESTAMPS", "rate=2", f"opentelemetry,url={collector.url}/v1/traces"]
    words += ["opentelemetry,resource=service.name=ferry", "opentelemetry,bsp_schedule_delay=100"]
    with serve("--model-repository", str(tmp_path / "r"), *(f"--trace-config={word}" for word in words)) as server:
        body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
        for headers in ({}, {}, {"traceparent": TRACEPARENT}):
            url = f"{server.url}/v2/models/m.identity/infer"
            assert httpx.post(url, json=body, headers=headers).status_code == 200
        shown = httpx.get(f"{server.url}/v2/trace/setting").json()
        assert (shown["trace_mode"], shown["resource"]) == ("opentelemetry", "service.name=ferry")
        assert httpx.post(f"{server.url}/v2/trace/setting", json={"trace_rate": "1"}).status_code == 501
        assert server.stop() == 0
    assert collector.services == {"ferry"}
    assert [attributes(span)["gen_ai.request.model"] for span in collector.spans] == ["m.identity"] * 2
    assert [span.trace_id.hex() == TRACE for span in collector.spans] == [False, True]
