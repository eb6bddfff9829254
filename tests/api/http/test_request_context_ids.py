"""X-Request-Id: answers carry it, plain or streamed, right or wrong; the request's record, too."""

from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2 as pb

from charonia.core.errors import QueueFull

from ..grpc_serving import serving

CHAT = {"model": "llm", "messages": [{"role": "user", "content": "hi"}]}
FLOATS = {"inputs": [{"name": "IN", "datatype": "FP32", "shape": [1, 1, 2], "data": [1, 2]}]}
ASKED = [
    ("/v1/chat/completions", CHAT),
    ("/v1/chat/completions", CHAT | {"stream": True}),
    ("/v1/completions", {"model": "nope", "prompt": "x"}),
    ("/v2/models/single/infer", FLOATS),
    ("/v2/models/llm/generate_stream", {"text_input": "x"}),
    ("/v2/models/nope/generate", {"text_input": "x"}),
]


@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_a_clients_id_comes_back_and_is_recorded(
    client: httpx.AsyncClient, gateway: Any, path: str, body: Any
) -> None:
    answer = await client.post(path, json=body, headers={"X-Request-Id": "mine-1"})
    assert answer.headers.get_list("x-request-id") == ["mine-1"]
    assert gateway.contexts[0].client_id == "mine-1"


async def test_openais_clients_get_one_made_up(client: httpx.AsyncClient, gateway: Any) -> None:
    answers = [await client.post("/v1/chat/completions", json=CHAT) for _ in range(2)]
    ids = [answer.headers["x-request-id"] for answer in answers]
    assert len(set(ids)) == 2
    assert [f"chatcmpl-{each}" for each in ids] == [answer.json()["id"] for answer in answers]
    gateway.error = QueueFull("full", retry_after=1)
    gateway.texts = ()
    assert len((await client.post("/v1/chat/completions", json=CHAT)).headers["x-request-id"]) == 32
    assert (await client.get("/v1/models")).headers["x-request-id"]
    assert "x-request-id" not in (await client.get("/v2")).headers


async def test_what_is_no_ascii_is_utf8(client: httpx.AsyncClient) -> None:
    given = [(b"X-Request-Id", "é".encode())]
    assert (await client.post("/v1/chat/completions", json=CHAT, headers=given)).json()["id"] == "chatcmpl-é"
    assert (await client.post("/v1/chat/completions", json=CHAT, headers=[(b"X-Request-Id", b"\x9b")])).is_success


async def test_what_nobody_expected_carries_it(client: httpx.AsyncClient, gateway: Any) -> None:
    gateway.error, gateway.texts = ZeroDivisionError(), ()
    answer = await client.post("/v1/chat/completions", json=CHAT, headers={"X-Request-Id": "x" * 300})
    assert (answer.status_code, answer.headers["x-request-id"]) == (500, "x" * 256)


async def test_a_call_over_grpc_records_it(gateway: Any) -> None:
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"hi"]}}
    message, metadata = pb.ModelInferRequest(model_name="nope", id="q", inputs=[text]), (("x-request-id", "mine-2"),)
    async with serving(gateway) as served:
        with pytest.raises(grpc.aio.AioRpcError):
            await served.stub.ModelInfer(message, metadata=metadata, timeout=60)
        async for _ in served.stub.ModelStreamInfer(iter([message]), metadata=metadata, timeout=60):
            pass
    assert [(context.id, context.client_id) for context in gateway.contexts] == [("q", "mine-2")] * 2
