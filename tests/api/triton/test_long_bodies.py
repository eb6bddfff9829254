"""Long bodies over HTTP: answered as short ones are, and what means nothing is refused before it is decoded."""

import json
import struct
from typing import Any

import httpx
import numpy as np
import pytest

from charonia.api import json_tensors, raw_tensors
from charonia.api.app import build_app
from charonia.api.metadata import ServerInfo
from charonia.core.request import InferResponse
from charonia.core.tensor import Tensor

LONG = 40_000
"""Values whose JSON is longer than a piece."""

CHAT, TEXT, GENERATE = "/v1/chat/completions", "/v1/completions", "/v2/models/llm/generate"


@pytest.fixture
def client(gateway: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(build_app(gateway, ServerInfo()))
    return httpx.AsyncClient(transport=transport, base_url="http://charonia")


def floats(count: int, **more: Any) -> dict[str, Any]:
    data = [[[index / 3 for index in range(count)]] * 2]
    return {"inputs": [{"name": "MATRIX", "datatype": "FP32", "shape": [1, 2, count], "data": data, **more}], "id": "a"}


def error(response: httpx.Response) -> str:
    said = response.json()["error"]
    return str(said["message"] if isinstance(said, dict) else said)


async def test_json_both_ways(client: httpx.AsyncClient, gateway: Any) -> None:
    body = floats(LONG)
    expected = np.array(body["inputs"][0]["data"], np.float32)
    gateway.responses = (InferResponse((Tensor("OUT", "FP32", expected.shape, expected),)),)
    answer = await client.post("/v2/models/numbers/infer", json=body)
    [asked] = gateway.asked
    assert np.array_equal(asked.inputs["MATRIX"].data, expected)
    said = answer.json()
    assert said == {
        "id": "a",
        "model_name": "numbers",
        "model_version": "3",
        "outputs": [{"name": "OUT", "datatype": "FP32", "shape": [1, 2, LONG], "data": expected.ravel().tolist()}],
    }


@pytest.mark.parametrize("value", [0.5, float("nan")])
async def test_an_answer_in_pieces_is_the_one_at_once(
    client: httpx.AsyncClient, gateway: Any, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = np.full((3, 1000), value, np.float32)
    texts = np.array([b"a", b'"', "é".encode(), b""] * 10, object)
    outputs = (
        Tensor("A", "FP32", (3, 1000), numbers),
        Tensor("B", "BYTES", (40,), texts),
        Tensor.from_values("C", "INT8", [1]),
    )
    gateway.responses = (InferResponse(outputs, {"x": 1}),)
    paths = GENERATE, f"{GENERATE}_stream"
    asked = [("/v2/models/single/infer", {"inputs": []}), *((path, {"text_input": "x"}) for path in paths)]
    at_once = [(await client.post(path, json=body)).content for path, body in asked]
    monkeypatch.setattr(json_tensors, "PIECE_ELEMENTS", 7)
    monkeypatch.setattr(raw_tensors, "LONG_ELEMENTS", 7)
    assert [(await client.post(path, json=body)).content for path, body in asked] == at_once


async def test_strings_in_raw_bytes(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.responses = ()
    element = struct.pack("<I", 2) + b"ab"
    tensor = {"name": "IN", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": LONG * 6}}
    for path, shape, text in (
        ("text", [1], "unexpected number of string elements"),
        ("text", [LONG], "unexpected shape for input 'IN' for model 'text'. Expected [1], got [40000]"),
        ("free", [LONG], "inference input 'IN' data-type is 'BYTES', but model 'free' expects 'FP32'"),
        ("free-texts", [2**59], "expected 576460752303423488 string elements for inference input 'IN' for model"),
    ):
        head = json.dumps({"inputs": [tensor | {"shape": shape}]}).encode()
        headers = {"Inference-Header-Content-Length": str(len(head))}
        answer = await client.post(f"/v2/models/{path}/infer", content=head + element * LONG, headers=headers)
        assert (answer.status_code, text in error(answer)) == (400, True), error(answer)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"name": "X"}, "unexpected inference input 'X' for model 'numbers'"),
        ({"datatype": "INT64"}, "data-type is 'INT64', but model 'numbers' expects 'FP32'"),
        ({"shape": [1, 3, LONG]}, "unexpected shape for input 'MATRIX'"),
    ],
)
async def test_what_does_not_fit_is_not_decoded(client: httpx.AsyncClient, more: Any, text: str) -> None:
    body = json.dumps(floats(LONG, **more)).replace("0.0", "nonsense").encode()
    answer = await client.post("/v2/models/numbers/infer", content=body)
    assert (answer.status_code, text in error(answer)) == (400, True), error(answer)


@pytest.mark.parametrize("count", [LONG - 1, LONG + 1])
async def test_the_shape_is_held_against_the_data(client: httpx.AsyncClient, count: int) -> None:
    answer = await client.post("/v2/models/numbers/infer", json=floats(LONG, shape=[1, 2, count]))
    assert (answer.status_code, "does not match true shape" in error(answer)) == (500, True)


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        (TEXT, {"prompt": "a", "stop_token_ids": [1] * LONG}, "stop_token_ids: a list"),
        (TEXT, {"prompt": "a", "stop_token_ids": [1] * 1025}, "stop_token_ids must be at most 1024 tokens, got 1025"),
        (TEXT, {"prompt": "a", "logit_bias": {str(n): 1 for n in range(1025)}}, "logit_bias must be at most 1024"),
        (TEXT, {"prompt": "a", "x": [1] * LONG}, "x: a list or an object in the request has more than 32768 values"),
        (TEXT, {"prompt": ["a"] * LONG}, "40000 prompts"),
        (TEXT, {"prompt": "a", "cache_salt": "x" * 70_000}, "cache_salt has 70000 characters"),
        (CHAT, {"messages": [{"role": "user", "content": "a"}] * 8193}, "messages: 8193 are more than the 8192"),
        (GENERATE, {"text_input": "a", "id": "x" * 5000}, "'id' has 5000 characters"),
        (GENERATE, {"text_input": "a" * (1 << 24)}, "a text in the request has more than 16777216 bytes"),
        (GENERATE, {"text_input": "a", "x": {"a": [1] * LONG}}, "more than 32768 values"),
        ("/v2/logging", {"x": [1] * LONG}, "more than 32768 values"),
        ("/v1/embeddings", {"input": ["a"] * 3000}, "input must be 1 to 2048, got 3000"),
    ],
)
async def test_what_means_nothing_is_not_read(client: httpx.AsyncClient, path: str, body: Any, text: str) -> None:
    answer = await client.post(path, json={"model": "llm"} | body if path.startswith("/v1") else body)
    assert (answer.status_code, text in error(answer)) == (400, True), error(answer)


async def test_token_ids_are_bounded_by_themselves(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("charonia.api.openai.json_body.MAX_IDS", LONG - 100)
    answer = await client.post(TEXT, json={"model": "llm", "prompt": [1] * LONG})
    assert "prompt: a list or an object in the request has more than 39900 values" in error(answer)


async def test_long_bodies_of_openai_s_door_are_read(client: httpx.AsyncClient, gateway: Any) -> None:
    words = "word, " * LONG
    allowed = list(range(LONG))
    await client.post(TEXT, json={"model": "llm", "prompt": allowed, "allowed_token_ids": allowed})
    await client.post(CHAT, json={"model": "llm", "messages": [{"role": "user", "content": words}] * 2})
    await client.post(GENERATE, json={"text_input": words, "parameters": {"a": 1}})
    ids, chat, text = gateway.asked
    assert ids.prompt == ids.sampling.allowed_token_ids == tuple(allowed)
    assert [message.content for message in chat.prompt.messages] == [words, words]
    assert (text.inputs["text_input"].scalar, text.parameters) == (words.encode(), {"a": 1})


@pytest.mark.parametrize("tail", ["]", "}", "", ",", " x"])
async def test_what_is_no_json(client: httpx.AsyncClient, tail: str) -> None:
    body = json.dumps({"model": "llm", "prompt": list(range(LONG))})[: None if tail == " x" else -1] + tail
    answer = await client.post(TEXT, content=body.encode())
    assert (answer.status_code == 200) == (tail == "}")
