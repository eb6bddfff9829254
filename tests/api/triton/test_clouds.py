"""SageMaker's and Vertex AI's endpoints: their paths and headers in front of v2's answers."""

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import numpy as np
import pytest

from charonia.api.app import build_app
from charonia.api.metadata import ServerInfo
from charonia.api.triton.clouds import CloudMiddleware
from charonia.cli.options import CloudOptions
from charonia.cli.plan import parse_clouds
from charonia.core.errors import InvalidArgument
from charonia.core.request import InferResponse
from charonia.core.tensor import Tensor

SAGEMAKER = CloudOptions(allow_sagemaker="true")
VERTEX_AI = CloudOptions(allow_vertex_ai="true", vertex_ai_default_model="numbers")
DEFAULT = {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "numbers"}
ROUTES = {"AIP_HEALTH_ROUTE": "/health", "AIP_PREDICT_ROUTE": "/predict"}
MATRIX = {"name": "MATRIX", "datatype": "FP32", "shape": [1, 2, 1], "data": [1, 2]}
OUT = Tensor.from_values("OUT", "FP32", [[[1.5, 2.0]]])


@asynccontextmanager
async def served(gateway: Any, options: CloudOptions, environment: dict[str, str]) -> AsyncIterator[httpx.AsyncClient]:
    gateway.responses = (InferResponse((OUT,)),)
    [cloud] = parse_clouds(options, environment)
    app = build_app(gateway, ServerInfo(name="ferry"))
    transport = httpx.ASGITransport(CloudMiddleware(app, cloud, lambda: ["numbers", "llm"]))
    async with httpx.AsyncClient(transport=transport, base_url="http://cloud") as client:
        yield client


async def test_sagemaker_pings_and_invokes(gateway: Any) -> None:
    async with served(gateway, SAGEMAKER, DEFAULT) as client:
        assert (await client.get("/ping")).status_code == 200
        gateway.is_ready = False
        assert (await client.get("/ping")).status_code == 400
        answer = await client.post("/invocations", json={"id": "7", "inputs": [MATRIX]})
    assert answer.headers["content-type"] == "application/json"
    assert answer.json() == {
        "id": "7",
        "model_name": "numbers",
        "model_version": "3",
        "outputs": [{"name": "OUT", "datatype": "FP32", "shape": [1, 1, 2], "data": [1.5, 2.0]}],
    }


async def test_sagemaker_may_ask_whether_it_lives_and_for_texts(gateway: Any) -> None:
    told = {
        "SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "llm",
        "SAGEMAKER_TRITON_PING_MODE": "live",
        "SAGEMAKER_TRITON_INFERENCE_TYPE": "generate_stream",
    }
    gateway.is_ready = False
    async with served(gateway, SAGEMAKER, told) as client:
        gateway.responses = None
        assert (await client.get("/ping")).status_code == 200
        answer = await client.post("/invocations", json={"text_input": "x"})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.text.startswith('data: {"model_name":"llm",')


@pytest.mark.parametrize(
    ("options", "told", "path", "media"),
    [
        (SAGEMAKER, DEFAULT, "/invocations", "application/vnd.sagemaker-triton.binary+json;json-header-size="),
        (VERTEX_AI, ROUTES, "/predict", "application/vnd.vertex-ai-triton.binary+json;json-header-size="),
    ],
)
async def test_the_type_of_a_body_tells_how_long_its_json_is(
    gateway: Any, options: CloudOptions, told: dict[str, str], path: str, media: str
) -> None:
    raw = np.array([1, 2], np.float32).tobytes()
    given = {**MATRIX, "parameters": {"binary_data_size": len(raw)}}
    del given["data"]
    head = json.dumps({"inputs": [given], "outputs": [{"name": "OUT", "parameters": {"binary_data": True}}]}).encode()
    async with served(gateway, options, told) as client:
        sent = {"content-type": f"{media.replace(';', '; ')}{len(head)}"}
        answer = await client.post(path, content=head + raw, headers=sent)
    assert answer.status_code == 200
    assert "inference-header-content-length" not in answer.headers
    kind, _, length = answer.headers["content-type"].rpartition("=")
    assert f"{kind}=" == media
    assert json.loads(answer.content[: int(length)])["outputs"][0]["parameters"] == {"binary_data_size": 8}
    assert np.frombuffer(answer.content[int(length) :], np.float32).tolist() == [1.5, 2.0]
    assert gateway.asked[0].inputs["MATRIX"].data.ravel().tolist() == [1, 2]


async def test_vertex_ai_reaches_all_of_v2_by_a_header(gateway: Any) -> None:
    async with served(gateway, VERTEX_AI, ROUTES) as client:
        assert (await client.get("/health")).status_code == 200
        for redirect, name in (
            ("v2", "ferry"),
            ("/v2/models/numbers", "numbers"),
            ("v2/models/numbers/config", "numbers"),
        ):
            answer = await client.post("/predict", headers={"x-vertex-ai-triton-redirect": redirect})
            assert answer.json()["name"] == name
        absent = await client.post("/predict", headers={"x-vertex-ai-triton-redirect": "v2/models/no/ready"})
        assert (absent.status_code, absent.json()) == (400, {"error": "Model version not ready"})
        index = await client.post("/predict", headers={"x-vertex-ai-triton-redirect": "v2/repository/index"})
        assert index.json() == []
        settings = {"x-vertex-ai-triton-redirect": "v2/logging"}
        changed = await client.post("/predict", json={"log_verbose_level": 1}, headers=settings)
        assert changed.json()["log_verbose_level"] == 1
        asked = {"x-vertex-ai-triton-redirect": "v2/models/numbers/infer"}
        assert (await client.post("/predict", json={"inputs": [MATRIX]}, headers=asked)).status_code == 200


async def test_vertex_ai_asks_the_only_model_there_is(gateway: Any) -> None:
    async with served(gateway, CloudOptions(allow_vertex_ai="1"), ROUTES) as client:
        answer = await client.post("/predict", json={"inputs": [MATRIX]})
    assert answer.status_code == 400
    assert answer.json() == {"error": "there are 2 models: --vertex-ai-default-model does not say which is asked"}


@pytest.mark.parametrize(
    ("method", "path", "status", "error"),
    [
        ("GET", "/v2", 404, "Not Found"),
        ("POST", "/ping", 404, "Not Found"),
        ("GET", "/models", 501, "endpoints of several models are not served on SageMaker"),
        ("POST", "/models/m/invoke", 501, "endpoints of several models are not served on SageMaker"),
        ("POST", "/invocations", 400, "failed to parse the request JSON buffer: Expecting value at 0"),
    ],
)
async def test_what_is_not_there(gateway: Any, method: str, path: str, status: int, error: str) -> None:
    async with served(gateway, SAGEMAKER, DEFAULT) as client:
        answer = await client.request(method, path)
    assert (answer.status_code, answer.json()) == (status, {"error": error})


@pytest.mark.parametrize(
    ("options", "told", "says"),
    [
        (SAGEMAKER, {}, "--allow-sagemaker needs the environment variable SAGEMAKER_TRITON_DEFAULT_MODEL_NAME"),
        (
            SAGEMAKER,
            DEFAULT | {"SAGEMAKER_TRITON_PING_MODE": "x"},
            "SAGEMAKER_TRITON_PING_MODE must be one of ready, live",
        ),
        (
            SAGEMAKER,
            DEFAULT | {"SAGEMAKER_TRITON_INFERENCE_TYPE": "x"},
            "must be one of infer, generate, generate_stream",
        ),
        (VERTEX_AI, {"AIP_HEALTH_ROUTE": "/h"}, "--allow-vertex-ai needs the environment variable AIP_PREDICT_ROUTE"),
        (VERTEX_AI, ROUTES | {"AIP_HTTP_PORT": "http"}, "AIP_HTTP_PORT must be a port, got 'http'"),
    ],
)
def test_an_environment_that_does_not_say_enough(options: CloudOptions, told: dict[str, str], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        parse_clouds(options, told)


@pytest.mark.parametrize(
    ("options", "told", "port"),
    [
        (VERTEX_AI, {}, 8080),
        (VERTEX_AI, {"AIP_HTTP_PORT": "9090"}, 9090),
        (CloudOptions(allow_vertex_ai="1", vertex_ai_port=7070), {"AIP_HTTP_PORT": "9090"}, 7070),
    ],
)
def test_where_vertex_ai_is_served(options: CloudOptions, told: dict[str, str], port: int) -> None:
    assert [cloud.port for cloud in parse_clouds(options, ROUTES | told)] == [port]


def test_nobody_has_such_doors_by_default() -> None:
    assert parse_clouds(CloudOptions(), {}) == ()
