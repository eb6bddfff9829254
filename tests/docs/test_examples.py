"""The examples run against the demo server as they stand, and answer what stands under them."""

import json
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2

from charonia.cli.extensions import observer_extensions, plan_extensions
from charonia.cli.options import ServeOptions
from charonia.cli.plan import endpoint_settings, server_facts
from charonia.telemetry.metric_families import CHARONIA_FAMILIES, TRITON_FAMILIES, VLLM_FAMILIES
from charonia.telemetry.request_log import RequestLogFields

LANGUAGES = ("bash", "python")
EXACT = {"error", "type", "param", "code", "object", "finish_reason", "count", "tokens"}
"""Members whose values are compared too."""


def examples(name: str) -> list[Any]:
    """(page, line, language, what to run, the block below it), read at collection."""
    text = (Path(__file__).resolve().parents[2] / "docs" / name).read_text()
    blocks = list(re.finditer(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    found = []
    for block, below in zip(blocks, [*blocks[1:], None], strict=True):
        if block[1] in LANGUAGES:
            line = text.count("\n", 0, block.start()) + 2
            answer = (below[1], below[2]) if below is not None and below[1] not in LANGUAGES else ("", "")
            found.append(pytest.param(block[1], block[2], answer, id=f"{name}:{line}"))
    return found


PAGES = ("clients.md", "responses.md", "messages.md", "structured-outputs.md", "metrics.md", "../README.md")


@pytest.mark.parametrize(("language", "code", "answer"), [example for name in PAGES for example in examples(name)])
def test_an_example(
    language: str, code: str, answer: tuple[str, str], demo: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for port, place in (("8000", demo.url), ("8001", demo.grpc_address), ("8002", demo.metrics_url)):
        code = code.replace(f"localhost:{port}", place.removeprefix("http://").removesuffix("/metrics"))
    said = run_bash(code) if language == "bash" else run_python(code, capsys)
    assert said.strip(), "it says nothing"
    kind, told = answer
    assert kind or language == "python", "what it answers stands under it"
    if kind:
        compare(kind, told, said)


def run_bash(code: str) -> str:
    command = ["bash", "-euo", "pipefail", "-c", code]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert run.returncode == 0, run.stderr
    return run.stdout


def run_python(code: str, capsys: pytest.CaptureFixture[str]) -> str:
    """In this process, where clients' libraries are imported once; in a thread, for there may be an event loop."""
    with ThreadPoolExecutor(1) as thread:
        thread.submit(exec, compile(code, "example", "exec"), {"__name__": "__main__"}).result(60)
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("program", "said"),
    [
        ("extract.py", r"(\d+ x '.*'\n){1,3}to (Oslo|Rome|Lima), (express|by the usual way)\n"),
        (
            "call_tools.py",
            r'find_price\({"item": "\w+"}\) gives {"item": .*}\n'
            r'convert\({"amount": [\d.]+, "currency": "[A-Z]{3}"}\) gives .*\n'
            r"answer: [\s\S]+",
        ),
    ],
)
def test_a_program_of_the_examples(
    program: str,
    said: str,
    demo: Any,
    root: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", [program, "--url", f"{demo.url}/v1"])
    assert re.fullmatch(said, found := run_python((root / "examples" / program).read_text(), capsys)), found


def compare(kind: str, told: str, said: str) -> None:
    """Whether an answer has the form of the documented one."""
    if kind == "json":
        assert shape(json.loads(said)) == shape(json.loads(told))
    elif kind == "http":
        _compare_http(told, said)
    elif told.startswith("data: "):
        events, documented = read_events(said), read_events(told)
        assert events[-1] == documented[-1]
        assert [each for each in documented if each not in events and not may_merge(each)] == []
    else:
        assert said.split("{")[0] == told.split("{")[0]


@pytest.mark.parametrize(
    ("kind", "told", "said"),
    [
        ("text", 'data: {"delta": {"role": "a"}, "finish_reason": null}\n\ndata: [DONE]', "data: [DONE]"),
        ("json", '{"count": 1}', '{"count": "1"}'),
        ("json", '{"text": ""}', '{"text": "", "more": null}'),
        ("http", 'HTTP/1.1 400 Bad Request\n\n{"error": "no"}', 'HTTP/1.1 400 Bad Request\r\n\r\n{"error": "yes"}'),
        ("http", "HTTP/1.1 200 OK", 'HTTP/1.1 400 Bad Request\r\n\r\n{"error": "yes"}'),
        ("http", "HTTP/1.1 200 OK\nretry-after: 1", "HTTP/1.1 200 OK\r\ndate: now\r\n"),
        ("text", "data: [DONE]", 'data: {"error": "x"}'),
        ("text", "name 1", "other 1"),
    ],
)
def test_the_check_bites(kind: str, told: str, said: str) -> None:
    with pytest.raises(AssertionError):
        compare(kind, told, said)


def _compare_http(told: str, said: str) -> None:
    (told_head, _, told_body), (head, _, body) = told.partition("\n\n"), said.replace("\r", "").partition("\n\n")
    status, *headers = told_head.strip().splitlines()
    assert head.splitlines()[0] == status
    for header in headers:
        assert header.partition(" ")[0] in head, "a header is missing"
    assert bool(body.strip()) == bool(told_body.strip())
    if body.strip():
        assert shape(json.loads(body)) == shape(json.loads(told_body))


def may_merge(event: Any) -> bool:
    """Whether it brings tokens that are not the last: those of a slow reader, on a busy machine, come with the next."""
    part = (event.get("choices") or [event])[0] if isinstance(event, dict) else {}
    return "finish_reason" in part and not part["finish_reason"] and "role" not in part.get("delta", {})


def read_events(text: str) -> list[Any]:
    lines = [line.removeprefix("data: ") for line in text.splitlines() if line]
    return [line if line == "[DONE]" else shape(json.loads(line), exact={"object", "finish_reason"}) for line in lines]


def shape(value: Any, exact: set[str] = EXACT, name: str = "") -> Any:
    """Keys, types, and the values of the members in `exact`."""
    if isinstance(value, dict):
        return {key: shape(member, exact, key) for key, member in sorted(value.items())}
    if name in exact and not isinstance(value, list):
        return value
    if isinstance(value, list):
        return [shape(member, exact, name) for member in value]
    return type(value).__name__


def test_every_metric_stands_there(demo: Any, page: Any, codes: Any) -> None:
    scrape = httpx.get(demo.metrics_url).text
    rows = {codes(cells[0])[0]: cells for cells in page("metrics.md").rows("family")}
    options = ServeOptions()
    plans = plan_extensions(options.extensions, server_facts(options, endpoint_settings(options)))
    extended = [family for extension in (*plans, *observer_extensions()) for family in extension.metrics]
    kinds = {family.name: family.kind for family in (*CHARONIA_FAMILIES, *TRITON_FAMILIES, *VLLM_FAMILIES, *extended)}
    missing = [f"| `{name}` | {kind} | | ... |" for name, kind in kinds.items() if name not in rows]
    assert missing == [], "add to a table in docs/metrics.md"
    assert sorted(rows.keys() - kinds.keys()) == [], "docs/metrics.md has families that are not there"
    assert {name: cells[1] for name, cells in rows.items()} == kinds
    more = {name: used - {"model", "version", "le", *codes(rows[name][2])} for name, used in labels(scrape).items()}
    assert {name: labels for name, labels in more.items() if labels} == {}, "labels that docs/metrics.md does not have"


def labels(scrape: str) -> dict[str, set[str]]:
    """The labels of each family."""
    found: dict[str, set[str]] = {}
    for line in scrape.splitlines():
        if line.startswith("# TYPE"):
            used = found[line.split()[2]] = set()
        elif not line.startswith("#"):
            used |= set(re.findall(r'(\w+)="', line))
    return found


def test_every_field_of_the_request_record_stands_there(demo: Any, page: Any, codes: Any) -> None:
    httpx.post(f"{demo.url}/v2/models/demo/generate", json={"input_ids": [1], "max_tokens": 1}).raise_for_status()
    records: list[Any] = []
    demo.until(lambda: bool(records.extend(read_records(demo.said)) or records))
    told = [name for cells in page("logs-and-traces.md").rows("field") for name in codes(cells[0])]
    assert sorted(told) == sorted(RequestLogFields._fields)
    shown = records[-1].keys() - {"time", "level", "logger", "message"}
    assert {"client", "door", "model", "generated_tokens", "ttft_ms"} <= shown <= set(told)


def read_records(said: str) -> list[Any]:
    whole = said.rpartition("\n")[0].splitlines()
    return [json.loads(line) for line in whole if line.startswith("{") and '"charonia.requests"' in line]


def test_every_alert_stands_there(root: Path, page: Any, codes: Any) -> None:
    rules = (root / "deploy" / "prometheus" / "rules.yml").read_text()
    alerts = re.findall(r"- alert: (\w+)", rules)
    severities = re.findall(r"severity: (\w+)", rules)
    told = {codes(cells[0])[0]: cells[1] for cells in page("metrics.md").rows("alert")}
    assert told == dict(zip(alerts, severities, strict=True))


def test_every_grpc_method_stands_there(demo: Any, page: Any, codes: Any) -> None:
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    with grpc.insecure_channel(demo.grpc_address) as channel:
        served = {method.name for method in service.methods if is_served(channel, service.full_name, method)}
    told = {name for cells in page("clients.md").rows("method") for name in codes(cells[0])}
    assert told == served | {"grpc.health.v1.Health/Check"}
    refused = page("clients.md").section("gRPC").partition("UNIMPLEMENTED:")[2].partition("\n\n")[0]
    assert set(codes(refused)) == {method.name for method in service.methods} - served | {"Health/Watch"}


def is_served(channel: Any, service: str, method: Any) -> bool:
    """Whether an empty call is answered, or refused for another reason than that nobody serves it."""
    path = f"/{service}/{method.name}"
    try:
        if method.client_streaming:
            list(channel.stream_stream(path)(iter(()), timeout=30))
        else:
            channel.unary_unary(path)(b"", timeout=30)
    except grpc.RpcError as error:
        unknown = error.code() is grpc.StatusCode.UNIMPLEMENTED
        return not unknown or "Client shared memory is disabled" in error.details()
    return True
