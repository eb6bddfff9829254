"""The v2 endpoints: every status and text a client may rely on."""

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from charonia.api.grpc.control_rpcs import server_live
from charonia.api.json_tensors import parse_json
from charonia.api.triton.generate import generate_body_to_infer_request
from charonia.core.errors import Internal, InvalidArgument, NotReady, QueueFull, ServerExiting, Unavailable, Unsupported
from charonia.core.model import ModelConfig

EXTENSIONS = [
    "classification",
    "sequence",
    "model_repository",
    "model_repository(unload_dependents)",
    "schedule_policy",
    "model_configuration",
    "system_shared_memory",
    "cuda_shared_memory",
    "binary_tensor_data",
    "parameters",
    "statistics",
    "trace",
    "logging",
]
GENERATE = "/v2/models/llm/generate"
STREAM = "/v2/models/llm/generate_stream"


@pytest.mark.parametrize(
    ("method", "path", "status", "body"),
    [
        ("GET", "/v2", 200, {"name": "triton", "version": "9.9", "extensions": EXTENSIONS}),
        ("GET", "/v2/health/live", 200, None),
        ("GET", "/v2/health/ready", 200, None),
        ("GET", "/v2/models/llm/ready", 200, None),
        ("GET", "/v2/models/llm/versions/1/ready", 200, None),
        ("GET", "/v2/models/no", 404, {"error": "Request for unknown model: 'no' is not found"}),
        ("GET", "/v2/models/no/ready", 400, {"error": "Model version not ready"}),
        ("GET", "/v2/models/llm/versions/7/ready", 400, {"error": "Model version not ready"}),
        ("GET", "/v2/models/llm/versions/7", 404, {"error": "Request for unknown model: 'llm' version 7 is not found"}),
        ("GET", "/v2/models/llm/versions/x", 404, {"error": "Not Found"}),
        ("GET", "/v2/", 404, {"error": "Not Found"}),
        ("GET", "/v2/docs", 404, {"error": "Not Found"}),
        ("POST", "/v2", 405, {"error": "Method Not Allowed"}),
        ("GET", GENERATE, 405, {"error": "Method Not Allowed"}),
        ("POST", "/v2/models/no/generate", 404, {"error": "Request for unknown model: 'no' is not found"}),
        ("POST", "/v2/models/no/generate_stream", 404, {"error": "Request for unknown model: 'no' is not found"}),
    ],
)
async def test_answers(client: httpx.AsyncClient, method: str, path: str, status: int, body: Any) -> None:
    response = await client.request(method, path)
    assert response.status_code == status
    if body is None:
        assert response.content == b""
    else:
        assert response.headers["content-type"] == "application/json"
        assert response.json() == body


async def test_a_server_whose_models_hang_elsewhere_is_not_live(
    client: httpx.AsyncClient, gateway: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gateway, "alive", lambda: False)
    assert (await client.get("/v2/health/live")).status_code == 400
    assert await server_live(gateway, None) == {"live": False}


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [("POST", "/v2", {"GET", "HEAD"}), ("GET", GENERATE, {"POST"}), ("DELETE", "/v1/models", {"GET", "HEAD"})],
)
async def test_a_wrong_method_is_told_the_right_ones(
    client: httpx.AsyncClient, method: str, path: str, allowed: set[str]
) -> None:
    response = await client.request(method, path)
    assert response.status_code == 405
    assert set(response.headers["allow"].split(", ")) == allowed


async def test_not_ready(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.is_ready = False
    response = await client.get("/v2/health/ready")
    assert (response.status_code, response.content) == (400, b"")
    response = await client.get("/v2/models/llm/ready")
    assert (response.status_code, response.json()) == (400, {"error": "Model version not ready"})


async def test_exiting(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.is_exiting = True
    response = await client.get("/v2/health/ready")
    assert (response.status_code, response.json()) == (503, {"error": "Server exiting"})
    assert response.headers["retry-after"] == "1"


async def test_metadata(client: httpx.AsyncClient) -> None:
    response = await client.get("/v2/models/numbers")
    assert response.content == (
        b'{"name":"numbers","versions":["3"],"platform":"identity_platform","inputs":['
        b'{"name":"MATRIX","datatype":"FP32","shape":[-1,2,-1]},{"name":"COUNT","datatype":"UINT8","shape":[-1,1]},'
        b'{"name":"SIGNED","datatype":"INT64","shape":[-1,-1]},{"name":"HALF","datatype":"FP16","shape":[-1,1]}],'
        b'"outputs":[{"name":"OUT","datatype":"FP32","shape":[-1,2,-1]}]}'
    )
    assert (await client.get("/v2/models/llm")).json()["platform"] == "charonia"


async def test_generate(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.texts = ("hé",)
    response = await client.post(GENERATE, json={"text_input": "hi", "id": "42", "max_tokens": 3})
    assert response.headers["content-type"] == "application/json"
    assert response.text == '{"id":"42","model_name":"llm","model_version":"1","text_output":"hé"}'
    [request] = gateway.asked
    assert request.id == "42"
    assert request.inputs["text_input"].scalar == b"hi"
    assert request.inputs["stream"].scalar is False
    assert request.parameters == {"id": "42", "max_tokens": 3}


@pytest.mark.parametrize("texts", [(), ("a", "b"), ("a", "b", "c")])
async def test_generate_wants_exactly_one_response(
    client: httpx.AsyncClient, gateway: Any, texts: tuple[str, ...]
) -> None:
    gateway.texts = texts
    response = await client.post(GENERATE, json={"text_input": "hi", "stream": True})
    assert response.status_code == 200
    assert response.json() == {
        "error": "generate expects model to produce exactly 1 response, "
        "use generate stream for model that generates various number of responses"
    }
    assert gateway.open_streams == 0


async def test_generate_stream_is_framed_to_the_byte(client: httpx.AsyncClient, gateway: Any) -> None:
    response = await client.post(STREAM, json={"text_input": "hi", "parameters": {"temperature": 0.5}})
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.content == (
        b'data: {"model_name":"llm","model_version":"1","text_output":"one"}\n\n'
        b'data: {"model_name":"llm","model_version":"1","text_output":" two"}\n\n'
    )
    assert gateway.asked[0].inputs["stream"].scalar is True
    assert gateway.asked[0].parameters == {"temperature": 0.5}


async def test_a_stream_of_nothing(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.texts = ()
    response = await client.post(STREAM)
    assert (response.status_code, response.content) == (200, b"")


ERRORS = [
    (InvalidArgument("bad"), 400, "bad"),
    (Unavailable("gone"), 503, "gone"),
    (NotReady("restarts"), 503, "restarts"),
    (ServerExiting(), 503, "Server exiting"),
    (Unsupported("never"), 501, "never"),
    (Internal("oops"), 500, "oops"),
    (QueueFull("full", retry_after=1.2), 429, "full"),
    (RuntimeError("a secret"), 500, "Internal Server Error"),
]


@pytest.mark.parametrize("path", [GENERATE, STREAM])
@pytest.mark.parametrize(("error", "status", "text"), ERRORS)
async def test_error_before_the_first_response(
    client: httpx.AsyncClient, gateway: Any, path: str, error: Exception, status: int, text: str
) -> None:
    gateway.texts, gateway.error = (), error
    response = await client.post(path, json={"text_input": "hi"})
    assert (response.status_code, response.json()) == (status, {"error": text})
    assert response.headers["content-type"] == "application/json"
    retry = {QueueFull: "2", NotReady: "1", ServerExiting: "1"}
    assert response.headers.get("retry-after") == retry.get(type(error))


@pytest.mark.parametrize(("error", "status", "text"), ERRORS)
async def test_error_after_the_first_response(
    client: httpx.AsyncClient, gateway: Any, error: Exception, status: int, text: str
) -> None:
    gateway.texts, gateway.error = ("one",), error
    response = await client.post(STREAM, json={"text_input": "hi"})
    assert response.status_code == 200
    events = response.content.split(b"\n\n")
    assert len(events) == 3
    assert events[1] == b'data: {"error":' + json.dumps(text).encode() + b"}"


def _as_bytes(body: Any) -> bytes:
    return body if isinstance(body, bytes) else json.dumps(body).encode()


MALFORMED = [
    (b'{"text_input": ', "failed to parse the request JSON buffer: "),
    (b"\xff\xfd", "failed to parse the request JSON buffer: it is not UTF-8: invalid start byte at 0"),
    (b'{"x": [' + b"[" * 900 + b"]" * 900 + b"]}", "the request JSON buffer: it is nested too deeply at 0"),
    (b"[" * 100_0, "failed to parse the request JSON buffer: "),
    (b"[1]", "failed to parse the request JSON buffer: "),
    (b'"text"', "failed to parse the request JSON buffer: "),
    (b'{"text_input": "\\ud800"}', "Unable to parse 'text_input': "),
    (b'{"a\\ud800": 1}', "Unable to parse 'a\\ud800': "),
    (b'{"stop_token_ids": [["\\ud800"]]}', "Unable to parse 'stop_token_ids': "),
    (b'{"stop_token_ids": [{"\\ud800": 1}]}', "Unable to parse 'stop_token_ids': "),
    (b'{"max_tokens": ' + b"9" * 1500 + b"}", "parameter 'max_tokens' must be between -2**63 and 2**64 - 1"),
    ({"text_input": 5}, "Unable to parse 'text_input': attempt to access JSON non-string as string"),
    ({"text_input": {"a": 1}}, "Unable to parse 'text_input': attempt to access JSON non-string as string"),
    ({"text_input": [["a"]]}, "Unable to parse 'text_input': attempt to access JSON non-string as string"),
    ({"stream": "false"}, "Unable to parse 'stream': attempt to access JSON non-boolean as boolean"),
    ({"stream": 1}, "Unable to parse 'stream': attempt to access JSON non-boolean as boolean"),
    ({"id": 5}, "Unable to parse 'id': attempt to access JSON non-string as string"),
    ({"text_input": ["a", "b"]}, "The schema can not convert input 'text_input' to tensor with proper shape"),
    ({"text_input": []}, "The schema can not convert input 'text_input' to tensor with proper shape"),
    (b'{"text_input": "a", "text_input": "b"}', "input 'text_input' already exists in request"),
    ({"text_input": "a", "parameters": {"text_input": "b"}}, "input 'text_input' already exists in request"),
    ({"parameters": 1}, "Expected JSON object for keyword: 'parameters'"),
    ({"stop_token_ids": [1], "sampling_parameters": "{"}, "Unable to parse 'sampling_parameters': "),
    ({"stop_token_ids": [1], "sampling_parameters": "[]"}, "Unable to parse 'sampling_parameters': "),
    (b" " * 2001, "request JSON size of 2001 bytes exceeds the maximum allowed input size of 2000 bytes. "),
]


async def test_an_input_that_is_called_parameters_leaves_no_room_for_them(client: httpx.AsyncClient) -> None:
    text = "Keyword 'parameters' for nested schema also given as input tensor name"
    response = await client.post("/v2/models/nested/generate", json={"parameters": {"a": 1}})
    assert (response.status_code, response.json()) == (400, {"error": text})


@pytest.mark.parametrize("path", [GENERATE, STREAM])
@pytest.mark.parametrize(("body", "text"), MALFORMED)
async def test_malformed_bodies(client: httpx.AsyncClient, gateway: Any, path: str, body: Any, text: str) -> None:
    response = await client.post(path, content=_as_bytes(body))
    assert response.status_code == 400
    assert text in response.json()["error"]
    assert not gateway.asked


@pytest.mark.parametrize(
    "read", [parse_json, lambda body: generate_body_to_infer_request(body, ModelConfig("llm", "1", "b"), stream=False)]
)
def test_a_number_of_too_many_digits_is_told_of_in_words_of_ours(read: Callable[[bytes], object]) -> None:
    with pytest.raises(InvalidArgument, match="JSON buffer: a number has too many digits at 0"):
        read(b'{"max_tokens": ' + b"9" * 5000 + b"}")


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ({"COUNT": 256}, "Unable to parse 'COUNT': attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ({"COUNT": -1}, "Unable to parse 'COUNT': attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ({"COUNT": True}, "Unable to parse 'COUNT': attempt to access JSON non-unsigned-integer as unsigned-integer"),
        ({"SIGNED": 1.5}, "Unable to parse 'SIGNED': attempt to access JSON non-signed-integer as signed-integer"),
        ({"SIGNED": 2**63}, "Unable to parse 'SIGNED': attempt to access JSON non-signed-integer as signed-integer"),
        ({"MATRIX": "1"}, "Unable to parse 'MATRIX': attempt to access JSON non-number as double"),
        ({"MATRIX": 10**400}, "Unable to parse 'MATRIX': attempt to access JSON non-number as double"),
        ({"MATRIX": [1, 2, 3]}, "The schema can not convert input 'MATRIX' to tensor with proper shape"),
        (
            {"HALF": 1},
            "receiving FP16 data via JSON is not supported. Please use the binary data format for input HALF",
        ),
    ],
)
async def test_malformed_numbers(client: httpx.AsyncClient, body: Any, text: str) -> None:
    response = await client.post("/v2/models/numbers/generate", json=body)
    assert (response.status_code, response.json()) == (400, {"error": text})


async def test_tensors_fill_the_declared_shape(client: httpx.AsyncClient, gateway: Any) -> None:
    body = b'{"MATRIX": [1, 2.5, NaN, 1e300, 5, 6], "COUNT": 255, "SIGNED": [-9, 9]}'
    assert (await client.post("/v2/models/numbers/versions/3/generate_stream", content=body)).status_code == 200
    inputs = gateway.asked[0].inputs
    assert (inputs["MATRIX"].shape, inputs["MATRIX"].data.dtype) == ((1, 2, 3), "float32")
    assert inputs["COUNT"].shape == (1, 1)
    assert (inputs["SIGNED"].shape, inputs["SIGNED"].data.tolist()) == ((1, 2), [[-9, 9]])


async def test_lists_travel_in_sampling_parameters(client: httpx.AsyncClient, gateway: Any) -> None:
    body = {"text_input": "a", "id": "x", "temperature": 0, "max_tokens": 5, "stop_token_ids": [1, 2]}
    await client.post(STREAM, json=body)
    sampling = json.loads(gateway.asked[0].inputs["sampling_parameters"].scalar)
    assert sampling == {"temperature": 0, "max_tokens": 5, "stop_token_ids": [1, 2]}


async def test_objects_travel_as_lists_do(client: httpx.AsyncClient, gateway: Any) -> None:
    for body in ({"structured_outputs": {"regex": "a"}}, {"parameters": {"structured_outputs": {"regex": "a"}}}):
        assert (await client.post(GENERATE, json={"text_input": "a", **body})).status_code == 200
        sampling = json.loads(gateway.asked[-1].inputs["sampling_parameters"].scalar)
        assert sampling == {"structured_outputs": {"regex": "a"}}


async def test_an_object_is_no_parameter_of_a_model_of_tensors(client: httpx.AsyncClient) -> None:
    problem = "parameter 'a' has invalid type. It should be either 'int', 'float', 'bool', or 'string'."
    nested = f"Converting keyword: 'parameters': {problem}"
    for body, text in (({"a": {"b": 1}}, problem), ({"parameters": {"a": []}}, nested)):
        response = await client.post("/v2/models/numbers/generate", json=body)
        assert (response.status_code, response.json()["error"]) == (400, text)


@pytest.mark.parametrize("name", ["temperature", "stream", "foo", "sampling_parameters"])
async def test_a_null_asks_for_nothing(client: httpx.AsyncClient, gateway: Any, name: str) -> None:
    for body in ({name: None}, {"parameters": {name: None}}):
        assert (await client.post(GENERATE, json={"text_input": "a", **body})).status_code == 200
        asked = gateway.asked[-1]
        assert (asked.parameters, asked.inputs.keys()) == ({}, {"text_input", "stream"})
    needed = await client.post("/v2/models/numbers/generate", json={"MATRIX": None})
    assert needed.status_code == 400


async def test_a_given_tensor_wins_over_parameters(client: httpx.AsyncClient, gateway: Any) -> None:
    body = {"max_tokens": 5, "stop_token_ids": [1], "sampling_parameters": '{"max_tokens": 9}'}
    await client.post(STREAM, json=body)
    sampling = json.loads(gateway.asked[0].inputs["sampling_parameters"].scalar)
    assert sampling == {"max_tokens": 9, "stop_token_ids": [1]}


async def test_only_identity_is_a_content_encoding(client: httpx.AsyncClient) -> None:
    response = await client.post(GENERATE, content=b"{}", headers={"content-encoding": "gzip"})
    assert response.status_code == 400
    assert response.json() == {"error": "Unsupported content-encoding, only 'identity' is supported."}
    assert (await client.post(STREAM, content=b"{}", headers={"content-encoding": "identity"})).status_code == 200
