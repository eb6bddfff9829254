"""Models that come on demand, on a real server: two language models that take turns, and an ensemble."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import tritonclient.grpc as triton_grpc

from .models import write_config, write_model

MIB = 1 << 20
IDENTITY = """
backend: "identity"
input { name: "A" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "B" data_type: TYPE_FP32 dims: [ 4 ] }
"""
ENSEMBLE = """
platform: "ensemble"
input { name: "A" data_type: TYPE_FP32 dims: [ 4 ] }
output { name: "B" data_type: TYPE_FP32 dims: [ 4 ] }
ensemble_scheduling { step {
  model_name: "inner" model_version: -1 input_map { key: "A" value: "A" } output_map { key: "B" value: "B" }
} }
"""


def test_models_come_when_they_are_asked_for(serve: Callable[..., Any], checkpoint: Path, tmp_path: Path) -> None:
    repository = tmp_path / "models"
    for name in ("one", "two"):
        write_model(repository, name, checkpoint, kv_cache_bytes=100 * MIB)
    write_config(repository, "inner", IDENTITY, "1")
    write_config(repository, "outer", ENSEMBLE, "1")
    flags = "--load-on-demand", "--min-resident-secs", "0", "--model-idle-secs", "0", "--spare-cores", "1"
    limit = "--memory-limit", str((300 + 160) * MIB)
    with (
        serve("--model-repository", str(repository), *flags, *limit) as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
    ):

        def complete(model: str) -> str:
            body = {"model": model, "prompt": "a b", "max_tokens": 4, "temperature": 0}
            return str(client.post("/v1/completions", json=body).raise_for_status().json()["choices"][0]["text"])

        assert client.get("/v2/health/ready").status_code == 200
        assert {each["id"] for each in client.get("/v1/models").json()["data"]} == {"inner", "one", "outer", "two"}
        for name in ("one", "two", "outer"):
            assert client.get(f"/v2/models/{name}/ready").status_code == 200
        assert client.get("/v2/models/one/config").json()["backend"] == "charonia"
        assert client.get("/v2/models/outer").json()["inputs"][0]["name"] == "A"
        assert client.get("/v2/models/outer/graph?statistics=1").status_code == 200
        assert client.get("/v2/models/outer/stats").json() == {"model_stats": []}
        index = client.post("/v2/repository/index").json()
        assert {(each["state"], each["reason"]) for each in index} == {("UNAVAILABLE", "on demand")}

        first = complete("one")
        assert complete("two") == complete("one") == first  # of one checkpoint
        tensor = triton_grpc.InferInput("A", [4], "FP32")
        tensor.set_data_from_numpy(np.arange(4, dtype=np.float32))
        with triton_grpc.InferenceServerClient(server.grpc_address) as grpc_client:
            assert grpc_client.infer("outer", [tensor]).as_numpy("B").tolist() == [0, 1, 2, 3]
        said = httpx.get(server.metrics_url).text
        assert "\ncharonia_on_demand_evictions_total 2\n" in said
        assert '\ncharonia_model_resident{model="two",version="1"} 0\n' in said
        assert '\ncharonia_model_resident{model="inner",version="1"} 1\n' in said
        assert server.stop() == 0, server.said


def test_a_command_that_contradicts_itself_is_refused(refused: Callable[..., str], checkpoint: Path) -> None:
    assert "--load-on-demand is for a model repository" in refused(str(checkpoint), "--load-on-demand")
    assert "and not --load-on-demand" in refused("--model-repository", str(checkpoint.parent), "--spare-cores", "1")
