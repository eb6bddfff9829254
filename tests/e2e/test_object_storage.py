"""A real server whose models are in a bucket, at moto's server behind a proxy that counts and spoils."""

import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.http as triton

from ..object_stores import BUCKET, Bucket, serving_s3, set_credentials
from ..proofs.fault_proxy import Fault, FaultProxy
from .models import FAKE, write_model
from .tensors import given

DOUBLER = """
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        asked = [pb_utils.get_input_tensor_by_name(request, "A").as_numpy() for request in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("B", {factor} * each)]) for each in asked]
"""
CONFIG = """
backend: "python"
input { name: "A" data_type: TYPE_FP32 dims: [ 2 ] }
output { name: "B" data_type: TYPE_FP32 dims: [ 2 ] }
"""


@pytest.fixture
def proxy(monkeypatch: pytest.MonkeyPatch) -> Iterator[FaultProxy]:
    set_credentials(monkeypatch)
    with serving_s3() as url, FaultProxy(url) as running:
        yield running


@pytest.fixture
def bucket(proxy: FaultProxy, tokenizer_only: Path, tmp_path: Path) -> Iterator[Bucket]:
    """It has a model in Python and a language model."""
    made = Bucket(proxy.target)
    put_version(made, 1, 2)
    made.put("doubler/config.pbtxt", CONFIG)
    write_model(tmp_path / "written", "fake", tokenizer_only, **FAKE)
    made.put_tree(tmp_path / "written")
    yield made
    made.close()


def put_version(bucket: Bucket, number: int, factor: int) -> None:
    bucket.put(f"doubler/{number}/model.py", DOUBLER.format(factor=factor))


@pytest.fixture
def flags(proxy: FaultProxy, tmp_path: Path) -> list[str]:
    return ["--model-repository", f"s3://{proxy.url}/{BUCKET}", "--model-cache-dir", str(tmp_path / "cache")]


def ask(client: Any, name: str = "doubler") -> tuple[float, str]:
    answer = client.infer(name, [given(triton, "A", np.array([1, 2], np.float32))])
    return float(answer.as_numpy("B")[0]), answer.get_response()["model_version"]


def metric(server: Any, name: str) -> float:
    found = re.search(rf"^{name}(?:{{.*}})? (\S+)$", httpx.get(server.metrics_url).text, re.MULTILINE)
    assert found, name
    return float(found[1])


def test_models_of_a_bucket_are_polled_without_a_gap(
    serve: Callable[..., Any], flags: list[str], bucket: Bucket, proxy: FaultProxy
) -> None:
    mode = "--model-control-mode", "poll", "--repository-poll-secs", "0.2"
    with serve(*flags, *mode) as server, triton.InferenceServerClient(server.http_address) as client:
        assert ask(client) == (2.0, "1")
        said = httpx.post(f"{server.url}/v2/models/fake/generate", json={"text_input": "a", "max_tokens": 3}).json()
        assert said["text_output"]
        assert metric(server, "charonia_repository_reachable") == 1
        assert metric(server, "charonia_model_cache_downloaded_bytes_total") > 0
        assert "downloading" in server.said
        put_version(bucket, 2, 3)
        server.until(lambda: ask(client) == (3.0, "2"))  # no answer on the way is an error
        bucket.put("routes.yaml", "routes: {first: {arms: [{model: doubler, version: 1, weight: 1}]}}")
        server.until(lambda: server.status("/v2/models/first/ready") == 200)
        assert (ask(client, "first"), ask(client)) == ((2.0, "1"), (3.0, "2"))
        proxy.away = True
        server.until(lambda: metric(server, "charonia_repository_reachable") == 0)
        assert (ask(client, "first"), ask(client)) == ((2.0, "1"), (3.0, "2"))
        put_version(bucket, 3, 5)
        proxy.away = False
        server.until(lambda: ask(client) == (5.0, "3"))
        assert ask(client, "first") == (2.0, "1")
        bucket.delete("doubler/")
        server.until(lambda: server.status("/v2/models/doubler/ready") != 200)
        assert server.status("/v2/models/fake/ready") == 200
        assert "secret-of-the-test" not in server.said
        assert server.stop() == 0, server.said


def test_a_restart_lists_and_starts_also_while_the_store_is_away(
    serve: Callable[..., Any], flags: list[str], bucket: Bucket, proxy: FaultProxy
) -> None:
    with serve(*flags) as server:
        assert server.url
        assert server.stop() == 0, server.said
    proxy.requests.clear()
    with serve(*flags) as server, triton.InferenceServerClient(server.http_address) as client:
        assert ask(client) == (2.0, "1")
        assert (proxy.listings, proxy.reads) == (1, 0)
        assert server.stop() == 0, server.said
    proxy.away = True
    with serve(*flags) as server, triton.InferenceServerClient(server.http_address) as client:
        assert ask(client) == (2.0, "1")
        assert "is away; what is in the cache is served" in server.said
        assert server.stop() == 0, server.said


def test_requests_load_what_the_bucket_has_by_then(
    serve: Callable[..., Any], flags: list[str], bucket: Bucket, proxy: FaultProxy
) -> None:
    with serve(*flags, "--model-control-mode", "explicit") as server:
        with triton.InferenceServerClient(server.http_address) as client:
            put_version(bucket, 2, 7)
            client.load_model("doubler")
            assert ask(client) == (7.0, "2")
            put_version(bucket, 3, 9)
            refusing = Fault(lambda request: "/3/" in request.path, status=403)
            said = r"object 'doubler/3/model\.py': the store refuses it"
            with proxy.fault(refusing), pytest.raises(triton.InferenceServerException, match=said):
                client.load_model("doubler")
            assert ask(client) == (7.0, "2")
            client.load_model("doubler")
            assert ask(client) == (9.0, "3")
            client.unload_model("doubler")
        assert server.stop() == 0, server.said


def test_a_server_that_downloads_stops_at_once(
    serve: Callable[..., Any], flags: list[str], bucket: Bucket, proxy: FaultProxy
) -> None:
    slow = Fault(lambda request: not request.is_listing, delay=20)
    with proxy.fault(slow), serve(*flags) as server:
        server.until(lambda: proxy.reads > 0)
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 15


def test_repositories_that_cannot_be_are_refused(
    refused: Callable[..., str], proxy: FaultProxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = "--model-cache-dir", str(tmp_path / "cache")
    assert "there is no such bucket" in refused("--model-repository", f"s3://{proxy.url}/nowhere", *cache)
    assert "names no bucket" in refused("--model-repository", "s3://", *cache)
    proxy.away = True
    assert "is away, and was never read from here" in refused("--model-repository", f"s3://{proxy.url}/models", *cache)
    (tmp_path / "cache").chmod(0o777)
    assert "nobody else may write to it" in refused("--model-repository", f"s3://{proxy.url}/models", *cache)
