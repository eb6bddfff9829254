"""Every metric that Triton has: a series of a real server's, or the reason why there is none."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from charonia.telemetry.host_metrics import usable_gpus

from .models import write_config
from .serving import Server, serving

IDENTITY = """
backend: "identity" max_batch_size: 4
input { name: "X" data_type: TYPE_FP32 dims: 1 }
output { name: "X" data_type: TYPE_FP32 dims: 1 }
metric_tags { key: "team" value: "ferry" }
"""
SQUARE = """
backend: "square"
model_metrics { metric_control {
  metric_identifier { family: "nv_inference_first_response_histogram_ms" }
  histogram_options { buckets: [ 1, 60000 ] }
} }
"""
PER_MODEL = (
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
    "nv_inference_pending_request_count",
    "nv_model_load_duration_secs",
)
SUMMARIES = (
    "nv_inference_request_summary_us",
    "nv_inference_queue_summary_us",
    "nv_inference_compute_input_summary_us",
    "nv_inference_compute_infer_summary_us",
    "nv_inference_compute_output_summary_us",
)
OF_THE_SERVER = (
    "nv_pinned_memory_pool_total_bytes",
    "nv_pinned_memory_pool_used_bytes",
    "nv_cpu_utilization",
    "nv_cpu_memory_total_bytes",
    "nv_cpu_memory_used_bytes",
)
OF_EACH_GPU = (
    "nv_gpu_utilization",
    "nv_gpu_memory_total_bytes",
    "nv_gpu_memory_used_bytes",
    "nv_gpu_power_usage",
    "nv_gpu_power_limit",
    "nv_energy_consumption",
)
OF_THE_CACHE = {
    "nv_cache_num_hits_per_model": 2,
    "nv_cache_num_misses_per_model": 1,
    "nv_cache_hit_summary_per_model_count": 2,
    "nv_cache_miss_summary_per_model_count": 1,
    "nv_inference_request_success": 3,
    "nv_inference_count": 1,
}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    repository = tmp_path_factory.mktemp("metrics") / "models"
    kept = IDENTITY + "response_cache { enable: true }"
    for name, config in (("same", IDENTITY), ("square", SQUARE), ("kept", kept)):
        write_config(repository, name, config)
    flags = ["--metrics-config=summary_latencies=true", "--metrics-config=histogram_latencies=true"]
    flags += ["--metrics-config=summary_quantiles=0.5:0.05,0.99:0.001", "--model-repository", str(repository)]
    flags += ["--cache-config=local,size=1048576"]
    with serving(repository.parent / "t", *flags) as server:
        body = {"inputs": [{"name": "X", "datatype": "FP32", "shape": [1, 1], "data": [2.0]}]}
        httpx.post(f"{server.url}/v2/models/same/infer", json=body).raise_for_status()
        for _ in range(3):
            answer = httpx.post(f"{server.url}/v2/models/kept/infer", json=body).raise_for_status()
            assert answer.json()["outputs"][0]["data"] == [2.0]
        httpx.post(f"{server.url}/v2/models/square/generate_stream", json={"IN": 3}).raise_for_status()
        yield server
        assert server.stop() == 0, server.said


@pytest.fixture(scope="module")
def samples(served: Any) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    """Of each name on the wire: value by labels."""
    texts: list[str] = []

    def has_utilization() -> bool:
        texts.append(httpx.get(served.metrics_url).text)
        return "nv_cpu_utilization " in texts[-1]  # not where the last scrape was a hundredth of a second ago

    served.until(has_utilization)
    found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
    for family in text_string_to_metric_families(texts[-1]):
        for sample in family.samples:
            name = sample.name.removesuffix("_total") if sample.name.startswith("nv_") else sample.name
            found.setdefault(name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return found


SAME = (("_team", "ferry"), ("model", "same"), ("version", "1"))


@pytest.mark.parametrize("name", PER_MODEL)
def test_each_model_has_a_series(samples: Any, name: str) -> None:
    labels = [dict(each) for each in samples[name]]
    assert {(label["model"], label["version"]) for label in labels} == {("same", "1"), ("square", "1"), ("kept", "1")}
    assert {label.get("_team") for label in labels} == {"ferry", None}


def test_ours_have_the_tags_of_the_config_too(samples: Any) -> None:
    for name in ("charonia_memory_held_bytes", "charonia_model_ready"):
        assert {dict(each).get("_team") for each in samples[name] if dict(each)["model"] == "same"} == {"ferry"}


def test_failures_have_every_reason_from_the_start(samples: Any) -> None:
    reasons = {dict(each)["reason"]: value for each, value in samples["nv_inference_request_failure"].items()}
    assert reasons == {"REJECTED": 0, "CANCELED": 0, "BACKEND": 0, "OTHER": 0}


@pytest.mark.parametrize("name", SUMMARIES)
def test_summaries_have_quantiles_count_and_sum(samples: Any, name: str) -> None:
    quantiles = {dict(each)["quantile"] for each in samples[name]}
    assert quantiles == {"0.5", "0.99"}
    assert samples[f"{name}_count"][SAME] == 1
    counter = samples[name.replace("_summary_us", "_duration_us")][SAME]
    assert samples[f"{name}_sum"][SAME] == counter


def test_the_first_response_has_the_configs_buckets(samples: Any) -> None:
    name = "nv_inference_first_response_histogram_ms"
    of_square = {key: value for key, value in samples[f"{name}_bucket"].items() if dict(key)["model"] == "square"}
    bounds = {dict(each)["le"]: value for each, value in of_square.items()}
    assert set(bounds) == {"1", "60000", "+Inf"}
    assert bounds["60000"] == 1
    assert {dict(key)["model"]: value for key, value in samples[f"{name}_count"].items()} == {
        "same": 1,
        "square": 1,
        "kept": 1,
    }


@pytest.mark.parametrize("name", OF_THE_SERVER)
def test_the_server_has_one_series(samples: Any, name: str) -> None:
    assert list(samples[name]) == [()]


@pytest.mark.parametrize("name", OF_EACH_GPU)
def test_gpus_have_a_family_where_there_are_any(served: Any, name: str) -> None:
    assert (f"# TYPE {name} " in httpx.get(served.metrics_url).text) is bool(usable_gpus())


@pytest.mark.parametrize("name", OF_THE_CACHE)
def test_answers_that_are_kept_are_counted_apart(samples: Any, name: str) -> None:
    assert samples[name][("_team", "ferry"), ("model", "kept"), ("version", "1")] == OF_THE_CACHE[name]


def test_answers_that_are_kept_have_durations_and_no_summary_of_the_whole(samples: Any) -> None:
    for name in ("nv_cache_hit_duration_per_model", "nv_cache_miss_duration_per_model"):
        assert [dict(each)["model"] for each in samples[name]] == ["kept"]
    assert {dict(each)["model"] for each in samples["nv_inference_request_summary_us"]} == {"same", "square"}


def test_statistics_tell_hits_and_misses(served: Any) -> None:
    [said] = httpx.get(f"{served.url}/v2/models/kept/stats").json()["model_stats"]
    counts = {name: times["count"] for name, times in said["inference_stats"].items()}
    assert counts == dict.fromkeys(("success", "queue"), 3) | dict.fromkeys(
        ("compute_input", "compute_infer", "compute_output", "cache_miss"), 1
    ) | {"fail": 0, "cache_hit": 2}
