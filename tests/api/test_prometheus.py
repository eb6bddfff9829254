"""The metrics port on the wire, over readings of a few lines."""

from collections.abc import AsyncIterator, Iterator

import httpx
import pytest
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.parser import text_string_to_metric_families

from charonia.api.prometheus import build_registry, metrics_app, render_exposition
from charonia.api.triton.endpoints import load_header
from charonia.cli.model_host import machine_metric_sources
from charonia.cli.options import ServerOptions
from charonia.core.metrics import Histogram, Measurement, Reading
from charonia.core.model import ModelStats
from charonia.telemetry.custom_metrics import CustomMetrics

LABELS = {"model": 'm"1\\\n', "version": "1"}


def test_tritons_environment_turns_gauges_of_gpus_off() -> None:
    sources = [
        len(list(machine_metric_sources(ServerOptions(), told))) for told in ({}, {"TRITON_SERVER_CPU_ONLY": "1"})
    ]
    assert sources == [2, 1]


def measure() -> Iterator[Measurement]:
    step = Histogram((1, 2))
    step.observe(1.5, times=2)
    readings = [
        Reading("nv_inference_request_success", 2**60),
        Reading("charonia_requests_total", 3, {"outcome": "stop", "reason": ""}),
        Reading("charonia_kv_cache_usage_ratio", 0.5),
        Reading("charonia_step_tokens", step),
        Reading("vllm:lora_requests_info", 1.5, {"max_lora": "8", "running_lora_adapters": "a,b"}),
    ]
    yield Measurement(LABELS, readings)


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    app = metrics_app(build_registry([measure], vllm=True))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://charonia") as connected:
        yield connected


async def test_the_text(client: httpx.AsyncClient) -> None:
    lines = (await client.get("/metrics")).text.splitlines()
    model = r'model="m\"1\\\n",version="1"'
    for line in (
        "# TYPE nv_inference_request_success counter",
        f"nv_inference_request_success{{{model}}} {2**60}",
        r'charonia_requests_total{model="m\"1\\\n",outcome="stop",version="1"} 3',
        f"charonia_kv_cache_usage_ratio{{{model}}} 0.5",
        f'charonia_step_tokens_bucket{{{model},le="1.0"}} 0',
        f'charonia_step_tokens_bucket{{{model},le="2.0"}} 2',
        f'charonia_step_tokens_bucket{{{model},le="+Inf"}} 2',
        f"charonia_step_tokens_sum{{{model}}} 3.0",
        f"charonia_step_tokens_count{{{model}}} 2",
        r'vllm:lora_requests_info{max_lora="8",model="m\"1\\\n",model_name="m\"1\\\n",'
        'running_lora_adapters="a,b",version="1"} 1.5',
        r'vllm:request_success_total{finished_reason="stop",model="m\"1\\\n",model_name="m\"1\\\n",version="1"} 3',
    ):
        assert line in lines


async def test_a_family_without_samples_is_not_named() -> None:
    assert render_exposition(build_registry([], vllm=True).collect()) == b""
    told = [
        line.split()[2]
        for line in render_exposition(build_registry([measure]).collect()).decode().splitlines()
        if "# " in line
    ]
    names = ["charonia_requests_total", "charonia_kv_cache_usage_ratio", "charonia_step_tokens"]
    names += ["nv_inference_request_success", "vllm:kv_cache_usage_perc", "vllm:lora_requests_info"]
    assert told == [name for name in names for _ in ("HELP", "TYPE")]


async def test_it_parses(client: httpx.AsyncClient) -> None:
    families = {family.name: family for family in text_string_to_metric_families((await client.get("/metrics")).text)}
    assert families["charonia_requests"].samples[0].labels == {**LABELS, "outcome": "stop"}
    assert families["charonia_step_tokens"].type == "histogram"


async def test_the_port(client: httpx.AsyncClient) -> None:
    for path in ("/metrics", "/metrics/"):
        answer = await client.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "text/plain; charset=utf-8")
        assert answer.content
    for path in ("/", "/metrics/x", "/v2"):
        answer = await client.get(path)
        assert (answer.status_code, answer.content) == (200, b"")
        assert (await client.post(path)).status_code == 405


def test_of_vllms_names_there_are_always_those_that_pickers_read() -> None:
    text = render_exposition(build_registry([measure]).collect()).decode()
    found = {family.name: family for family in text_string_to_metric_families(text) if family.name.startswith("vllm:")}
    assert found.keys() == {"vllm:kv_cache_usage_perc", "vllm:lora_requests_info"}
    [sample] = found["vllm:kv_cache_usage_perc"].samples
    assert (sample.value, sample.labels["model_name"]) == (0.5, LABELS["model"])


def test_others_may_register_too() -> None:
    registry = CollectorRegistry()
    Counter("spins", "Of a wheel", registry=registry).inc()
    assert "spins_total 1.0\n" in render_exposition(registry.collect()).decode()


def test_a_models_own_histogram_has_bounds_as_triton_writes_them() -> None:
    custom = CustomMetrics()
    custom.add_family("sizes", "", "histogram")
    custom.add_metric(None, "sizes", {"e": "a"}, [0.1, 1.0, 10])
    lines = render_exposition(build_registry([], custom=custom).collect()).decode().splitlines()
    assert [line for line in lines if "_bucket" in line] == [
        f'sizes_bucket{{e="a",le="{bound}"}} 0' for bound in ("0.1", "1", "10", "+Inf")
    ]


def test_the_load_header() -> None:
    stats = ModelStats(True, kv_tokens=16, kv_token_capacity=64)
    text = "TEXT named_metrics.kv_cache_utilization=0.250000, named_metrics.max_token_capacity=64"
    object_ = 'JSON {"named_metrics":{"kv_cache_utilization":0.25,"max_token_capacity":64}}'
    assert load_header("text", stats) == {"endpoint-load-metrics": text}
    assert load_header("json", stats) == {"endpoint-load-metrics": object_}
    assert load_header("xml", stats) == load_header("text", ModelStats(True)) == {}
