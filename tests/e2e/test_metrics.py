"""What a real server's metrics port says of known traffic."""

import json
import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

FLAGS = ["--executor", "fake", "--fake-vocab-size", "384", "--served-model-name", "m"]
Labels = tuple[tuple[str, str], ...]


class Scrape:
    """One look at the metrics port."""

    def __init__(self, text: str) -> None:
        self.families = {family.name: family for family in text_string_to_metric_families(text)}
        self.samples = {
            (_on_the_wire(sample.name), tuple(sorted(sample.labels.items()))): sample.value
            for family in self.families.values()
            for sample in family.samples
        }

    def __call__(self, name: str, **labels: str) -> float:
        return self.samples[name, tuple(sorted({"model": "m", "version": "1", **labels}.items()))]

    def counters(self) -> dict[tuple[str, Labels], float]:
        kinds = ("counter", "histogram")
        counting = [family for family in self.families.values() if family.type in kinds]
        names = {_on_the_wire(sample.name) for family in counting for sample in family.samples}
        return {key: value for key, value in self.samples.items() if key[0] in names}


def _on_the_wire(name: str) -> str:
    """The parser puts `_total` on every counter, Triton on none."""
    return name.removesuffix("_total") if name.startswith("nv_") else name


def scrape(server: Any) -> Scrape:
    return Scrape(httpx.get(server.metrics_url).text)


def scrape_when(server: Any, holds: Callable[[Scrape], bool]) -> Scrape:
    server.until(lambda: holds(scrape(server)))
    return scrape(server)


def generate(server: Any, first: int, prompt: int, max_tokens: int, model: str = "m", **more: Any) -> httpx.Response:
    body = {"input_ids": list(range(first, first + prompt)), "max_tokens": max_tokens, **more}
    return httpx.post(f"{server.url}/v2/models/{model}/generate", json=body, timeout=60)


def leave(server: Any, body: Any) -> None:
    """Ask for a stream, and go when its first event is there."""
    with httpx.stream("POST", f"{server.url}/v2/models/m/generate_stream", json=body, timeout=60) as response:
        next(line for line in response.iter_lines() if line)


def requests(seen: Scrape, **labels: str) -> float:
    """How many ended with these labels, whatever the others."""
    return sum(
        value
        for (name, own), value in seen.samples.items()
        if name == "charonia_requests_total" and labels.items() <= {*own}
    )


def test_counts_after_known_traffic(serve: Any, tokenizer_only: Path) -> None:
    with serve(str(tokenizer_only), *FLAGS, "--fake-step-seconds", "0.005") as server:
        assert generate(server, 10, prompt=40, max_tokens=5).status_code == 200
        assert generate(server, 10, prompt=40, max_tokens=7).status_code == 200
        assert generate(server, 100, prompt=3, max_tokens=9, stop_token_ids=[105]).status_code == 200
        assert generate(server, 380, prompt=9, max_tokens=1).status_code == 400
        assert generate(server, 1, prompt=1, max_tokens=1, beam_width=2).status_code == 400
        leave(server, {"input_ids": [200], "max_tokens": 150})
        seen = scrape_when(server, lambda seen: requests(seen, outcome="cancelled") == 1)
        assert_requests(seen)
        assert_tokens(seen)
        assert_histograms(seen)
        assert_idle(scrape_when(server, lambda seen: seen("charonia_requests_running") == 0))
        assert server.stop() == 0
    assert_one_record_each(server.said)


def assert_requests(seen: Scrape) -> None:
    ends = ("length", "stop", "cancelled", "rejected", "error")
    outcomes = {end: requests(seen, outcome=end) for end in ends}
    assert outcomes == {"length": 2, "stop": 1, "cancelled": 1, "rejected": 2, "error": 0}
    assert seen("charonia_requests_total", outcome="rejected", reason="invalid_argument") == 2
    assert seen("nv_inference_request_success") == seen("nv_inference_count") == 3
    failures = {reason: seen("nv_inference_request_failure", reason=reason) for reason in ("REJECTED", "OTHER")}
    assert failures == {"REJECTED": 0, "OTHER": 2}
    assert seen("nv_inference_request_failure", reason="CANCELED") == 1
    parts = ("queue", "compute_input", "compute_infer", "compute_output")
    spent = [seen(f"nv_inference_{part}_duration_us") for part in parts]
    assert abs(seen("nv_inference_request_duration_us") - sum(spent)) <= 4 * 3


def assert_tokens(seen: Scrape) -> None:
    assert seen("charonia_prompt_tokens_total") == 40 + 40 + 3 + 1
    assert seen("charonia_prefix_cache_queries_total") == 40 + 40 + 3 + 1
    assert seen("charonia_prefix_cache_hits_total") == 32
    assert 5 + 7 + 3 < seen("charonia_generation_tokens_total") <= 5 + 7 + 3 + 150


def assert_histograms(seen: Scrape) -> None:
    answered, begun = 3, 4
    assert seen("charonia_request_seconds_count") == seen("charonia_decode_seconds_count") == answered
    assert seen("charonia_time_to_first_token_seconds_count") == seen("charonia_prefill_seconds_count") == begun
    assert seen("charonia_queue_seconds_count") == begun
    gaps = seen("charonia_generation_tokens_total") - begun
    assert seen("charonia_inter_token_latency_seconds_count") == gaps
    # One sequence at a time: every token is a step's, and a step computes prompt tokens or the last token.
    assert seen("charonia_step_seconds_count") == seen("charonia_step_sequences_sum")
    assert seen("charonia_step_tokens_bucket", le="+Inf") == seen("charonia_step_tokens_count")


def assert_idle(seen: Scrape) -> None:
    assert seen("charonia_requests_waiting", **{"class": "0"}) == seen("charonia_queue_age_seconds") == 0
    assert seen("charonia_model_ready") == 1
    assert seen("charonia_core_restarts_total") == 0
    assert ("charonia_event_loop_lag_seconds", ()) in seen.samples


def assert_one_record_each(said: str) -> None:
    records = [line for line in said.splitlines() if "charonia.requests" in line]
    assert len(records) == 6
    assert sum("outcome=rejected reason=invalid_argument" in record for record in records) == 2
    [stopped] = [record for record in records if "outcome=stop" in record]
    for told in ("model=m version=1", "finish_reason=stop", "prompt_tokens=3 cached_tokens=0 generated_tokens=3"):
        assert told in stopped
    assert "door=generate " in stopped
    assert "ttft_ms=" in stopped


def test_a_full_queue_shows(server: Any) -> None:
    slow = {"model": "slow"}
    full = {**slow, "outcome": "rejected", "reason": "queue_full_requests"}
    before = scrape_when(server, lambda seen: seen("charonia_requests_running", **slow) == 0)

    def more(seen: Scrape, name: str, **labels: str) -> float:
        return seen(name, **slow, **labels) - before(name, **slow, **labels)

    with ExitStack() as stack:
        stack.enter_context(asking(server))
        scrape_when(server, lambda seen: seen("charonia_requests_running", **slow) == 1)
        stack.enter_context(asking(server))
        seen = scrape_when(server, lambda seen: seen("charonia_requests_waiting", **slow, **{"class": "0"}) == 1)
        assert seen("nv_inference_pending_request_count", **slow) == 1
        assert seen("charonia_queue_age_seconds", **slow) > 0
        assert seen("charonia_kv_cache_usage_ratio", **slow) > 0
        assert generate(server, 1, prompt=1, max_tokens=1, model="slow").status_code == 429
        seen = scrape(server)
        assert requests(seen, **full) - requests(before, **full) == 1
        assert more(seen, "nv_inference_request_failure", reason="REJECTED") == 1
    gone = requests(before, **slow, outcome="cancelled") + 2
    seen = scrape_when(server, lambda seen: requests(seen, **slow, outcome="cancelled") == gone)
    assert more(seen, "charonia_prompt_tokens_total") == 1
    scrape_when(server, lambda seen: seen("charonia_kv_cache_usage_ratio", **slow) == 0)


@contextmanager
def asking(server: Any) -> Iterator[None]:
    """A request that takes long, given up at the end; whether it runs or waits."""
    body = json.dumps({"input_ids": [1], "max_tokens": 500}).encode()
    head = f"POST /v2/models/slow/generate HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(server.address) as connection:
        connection.sendall(head.encode() + body)
        yield


def test_a_restart_keeps_counters_and_takes_none_back(serve: Any, tokenizer_only: Path) -> None:
    flags = [*FLAGS, "--fake-step-seconds", "0.01", "--metrics-names", "vllm", "--log-format", "json"]
    with serve(str(tokenizer_only), *flags, "--log-verbose", "1") as server:
        generate(server, 10, prompt=40, max_tokens=2)
        generate(server, 10, prompt=40, max_tokens=2)
        before = scrape(server)
        with ExitStack() as stack:
            url, body = f"{server.url}/v2/models/m/generate_stream", {"input_ids": [1], "max_tokens": 200}
            response = stack.enter_context(httpx.stream("POST", url, json=body, timeout=60))
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            [core] = server.cores()
            os.kill(core, signal.SIGKILL)
            *_, last = lines
        assert "error" in json.loads(last.removeprefix("data: "))
        server.until(lambda: server.status("/v2/health/ready") == 200)
        generate(server, 10, prompt=40, max_tokens=2)
        after = scrape(server)
        assert server.stop() == 0
    assert {key: value for key, value in before.counters().items() if after.samples[key] < value} == {}
    assert after("charonia_core_restarts_total") == 1
    assert after("charonia_requests_total", outcome="error", reason="unavailable") == 1
    assert after("charonia_prefix_cache_queries_total") == 40 + 40 + 1 + 40
    assert after("charonia_prefix_cache_hits_total") == 32
    assert_vllm_names(after)
    assert_json_records(server.said)
    assert "the engine core serves again" in server.said
    assert server.said.count("m: warm-up") == 1, "phases are told of the start alone"


def assert_vllm_names(seen: Scrape) -> None:
    name = {"model_name": "m"}
    assert seen("vllm:request_success_total", finished_reason="length", **name) == 3
    assert seen("vllm:request_success_total", finished_reason="error", **name) == 1
    for theirs, ours in [
        ("vllm:prompt_tokens_total", "charonia_prompt_tokens_total"),
        ("vllm:generation_tokens_total", "charonia_generation_tokens_total"),
        ("vllm:time_to_first_token_seconds_count", "charonia_time_to_first_token_seconds_count"),
        ("vllm:time_per_output_token_seconds_sum", "charonia_inter_token_latency_seconds_sum"),
        ("vllm:num_requests_running", "charonia_requests_running"),
    ]:
        assert seen(theirs, **name) == seen(ours)
    assert seen("vllm:request_prompt_tokens_sum", **name) == 3 * 40


def assert_json_records(said: str) -> None:
    records = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
    ended = [record for record in records if record["logger"] == "charonia.requests"]
    assert [record["outcome"] for record in ended] == ["length", "length", "error", "length"]
    assert [record["cached_tokens"] for record in ended] == [0, 32, 0, 0]
    assert {"time", "level", "message", "client", "model", "queue_ms", "ttft_ms", "e2e_ms"} <= ended[0].keys()
    assert_access_lines(records)


def assert_access_lines(records: list[dict[str, Any]]) -> None:
    """Of every HTTP request, lookups included; scrapes leave none."""
    lines = [record["message"].partition(" - ")[2] for record in records if record["logger"] == "uvicorn.access"]
    assert lines.count('"POST /v2/models/m/generate HTTP/1.1" 200') == 3
    assert '"GET /v2/health/ready HTTP/1.1" 200' in lines
    assert not [line for line in lines if "/metrics" in line]
    assert not [record for record in records if "color_message" in record]


def test_the_port_on_the_wire(server: Any) -> None:
    answer = httpx.get(server.metrics_url + "/")
    assert (answer.status_code, answer.headers["content-type"]) == (200, "text/plain; charset=utf-8")
    assert "# TYPE nv_inference_request_success counter\n" in answer.text
    assert "vllm:prompt_tokens_total" not in answer.text
    assert 'charonia_model_load_failures_total{model="broken",version="1"} 1\n' in answer.text
    elsewhere = httpx.get(server.metrics_url.removesuffix("/metrics") + "/v2/health/live")
    assert (elsewhere.status_code, elsewhere.content) == (200, b"")
    assert httpx.post(server.metrics_url).status_code == 405


@pytest.mark.parametrize("port", ["metrics", "main"])
def test_gateways_find_what_they_pick_by(server: Any, port: str) -> None:
    """The specs of the Gateway API's endpoint picker for its engine types vllm and triton-tensorrt-llm."""
    url = server.metrics_url if port == "metrics" else f"{server.url}/metrics"
    families = {family.name: family for family in text_string_to_metric_families(httpx.get(url).text)}

    def read(family: str, **labels: str) -> Any:
        assert families[family].type == "gauge"
        wanted = {"model": "fake", **labels}
        [sample] = [sample for sample in families[family].samples if wanted.items() <= sample.labels.items()]
        return sample

    for vllm, triton in (
        ("vllm:num_requests_waiting", ("nv_trt_llm_request_metrics", {"request_type": "waiting"})),
        ("vllm:num_requests_running", ("nv_trt_llm_request_metrics", {"request_type": "scheduled"})),
        ("vllm:kv_cache_usage_perc", ("nv_trt_llm_kv_cache_block_metrics", {"kv_cache_block_type": "fraction"})),
    ):
        family, label = triton
        assert read(vllm, model_name="fake").value == read(family, **label).value
    info = read("vllm:cache_config_info").labels
    for label, kind in (("block_size", "tokens_per"), ("num_gpu_blocks", "max")):
        of_triton = read("nv_trt_llm_kv_cache_block_metrics", kv_cache_block_type=kind).value
        assert int(info[label]) == of_triton > 0


@pytest.mark.parametrize(("form", "begins"), [("text", "TEXT named_metrics.kv_cache_"), ("json", "JSON {")])
@pytest.mark.parametrize("path", ["generate", "generate_stream"])
def test_the_load_header(server: Any, form: str, begins: str, path: str) -> None:
    url, body = f"{server.url}/v2/models/fake/{path}", {"input_ids": [1], "max_tokens": 2}
    assert "endpoint-load-metrics" not in httpx.post(url, json=body).headers
    answer = httpx.post(url, json=body, headers={"endpoint-load-metrics-format": form})
    told = answer.headers["endpoint-load-metrics"]
    assert told.startswith(begins)
    assert "kv_cache_utilization" in told
    assert "max_token_capacity" in told


def test_no_metrics(serve: Any, tmp_path: Path) -> None:
    (tmp_path / "r").mkdir()
    with serve("--model-repository", str(tmp_path / "r"), "--allow-metrics=false") as server:
        assert server.url
        assert "Metrics on" not in server.said


def test_a_metrics_port_in_use(refused: Any, server: Any, tokenizer_only: Path) -> None:
    port = httpx.URL(server.metrics_url).port
    said = refused(str(tokenizer_only), *FLAGS, "--metrics-port", str(port))
    assert "Address already in use (--metrics-port)" in said
