"""Every request of every endpoint has one context, and how it ended is known; health and lookups have none."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import httpx
import pytest
from tritonclient.grpc import service_pb2 as pb

from charonia.api.api_keys import Keyring, Tenant
from charonia.api.app import build_app
from charonia.api.http.request_context import RequestContextMiddleware
from charonia.api.metadata import ServerInfo
from charonia.core.errors import InvalidArgument, QueueFull, Unavailable

from ..grpc_serving import Served, serving
from .test_uvicorn_protocol import Connection, request

KEYS = Keyring([("k", Tenant("alice"))])
KEY = {"authorization": "Bearer k"}
CHAT = {"model": "llm", "messages": [{"role": "user", "content": "hi"}]}
GENERATE = {"text_input": "hi"}

Asked = tuple[str, Any]
ENDPOINTS: dict[str, Asked] = {
    "generate": ("/v2/models/llm/generate", GENERATE),
    "generate_stream": ("/v2/models/llm/versions/1/generate_stream", GENERATE),
    "completions": ("/v1/completions", {"model": "llm", "prompt": "hi"}),
    "chat": ("/v1/chat/completions", CHAT),
    "tokenize": ("/tokenize", {"model": "llm", "prompt": "hi"}),
    "detokenize": ("/detokenize", {"model": "llm", "tokens": [1]}),
}


@pytest.fixture
async def keyed(gateway: Any) -> AsyncIterator[httpx.AsyncClient]:
    app = build_app(gateway, ServerInfo("triton", "9.9", max_input_size=2000), KEYS)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://charonia") as connected:
        yield connected


def ends(gateway: Any) -> list[tuple[str, str, str, str]]:
    return [
        (context.endpoint, context.tenant, context.end.outcome.value, context.end.reason)
        for context in gateway.contexts
    ]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_a_refusal_before_any_model_is_an_end(keyed: httpx.AsyncClient, gateway: Any, endpoint: str) -> None:
    path, body = ENDPOINTS[endpoint]
    assert (await keyed.post(path, json=body)).status_code == 401
    assert (await keyed.post(path, content=b"{", headers=KEY)).status_code == 400
    too_large = await keyed.post(path, content=b" " * 3000, headers=KEY)
    assert too_large.status_code == (400 if path.startswith("/v2/") else 413)
    invalid = ("rejected", "invalid_argument")
    expected = [("", "rejected", "unauthenticated"), ("alice", *invalid), ("alice", *invalid)]
    assert ends(gateway) == [(endpoint, *each) for each in expected]


@pytest.mark.parametrize("endpoint", ENDPOINTS)
async def test_an_unknown_model_is_an_end(keyed: httpx.AsyncClient, gateway: Any, endpoint: str) -> None:
    path, body = ENDPOINTS[endpoint]
    answer = await keyed.post(path.replace("llm", "nope"), json=body | {"model": "nope"}, headers=KEY)
    assert answer.status_code == 404
    assert ends(gateway) == [(endpoint, "alice", "rejected", "not_found")]


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (QueueFull("full", retry_after=1, limit="tokens"), ("rejected", "queue_full_tokens")),
        (InvalidArgument("no"), ("rejected", "invalid_argument")),
        (Unavailable("Server exiting"), ("rejected", "unavailable")),
        (ZeroDivisionError(), ("error", "internal")),
    ],
)
@pytest.mark.parametrize("endpoint", ["generate", "generate_stream", "completions", "chat"])
async def test_an_error_of_the_model_is_an_end(
    keyed: httpx.AsyncClient, gateway: Any, endpoint: str, error: Exception, end: tuple[str, str]
) -> None:
    gateway.texts, gateway.error = (), error
    path, body = ENDPOINTS[endpoint]
    assert (await keyed.post(path, json=body, headers=KEY)).status_code >= 400
    assert ends(gateway) == [(endpoint, "alice", *end)]


async def test_more_answers_than_the_endpoint_gives_are_an_end(keyed: httpx.AsyncClient, gateway: Any) -> None:
    path, body = ENDPOINTS["generate"]
    assert (await keyed.post(path, json=body | {"stream": True}, headers=KEY)).status_code == 200  # as Triton's
    assert ends(gateway) == [("generate", "alice", "rejected", "unsupported")]


async def test_what_is_no_request_leaves_nothing(keyed: httpx.AsyncClient, gateway: Any) -> None:
    for path in ("/v2/health/live", "/v2", "/v1/models", "/v2/models/llm", "/nowhere", "/v1/completions"):
        await keyed.get(path, headers=KEY)
    await keyed.post("/nowhere", headers=KEY)
    assert gateway.contexts == []


@pytest.fixture
async def served(gateway: Any) -> AsyncIterator[Served]:
    async with serving(gateway, KEYS) as server:
        yield server


@pytest.fixture
def stub(served: Served) -> Any:
    return served.stub


METADATA = (("authorization", "Bearer k"),)
UNARY, STREAM = "ModelInfer", "ModelStreamInfer"


def message(model: str, request_id: str = "") -> Any:
    text = {"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"hi"]}}
    return pb.ModelInferRequest(model_name=model, id=request_id, inputs=[text])


async def test_a_unary_call_is_one_request(stub: Any, gateway: Any) -> None:
    for model, metadata in (("llm", ()), ("nope", METADATA)):
        with pytest.raises(grpc.aio.AioRpcError):
            await asyncio.wait_for(stub.ModelInfer(message(model, "7"), metadata=metadata), 60)
    refused = [(UNARY, "", "rejected", "unauthenticated"), (UNARY, "alice", "rejected", "not_found")]
    assert ends(gateway) == refused
    assert [context.id for context in gateway.contexts] == ["", "7"]
    assert ("authorization", "Bearer k") in gateway.contexts[1].headers


async def test_bytes_that_are_no_message_are_a_request_too(served: Served, gateway: Any) -> None:
    call = served.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await asyncio.wait_for(call(b"\xff", metadata=METADATA), 60)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert ends(gateway) == [(UNARY, "alice", "rejected", "invalid_argument")]


async def test_each_message_of_a_stream_is_a_request_and_an_idle_stream_is_none(stub: Any, gateway: Any) -> None:
    async for _ in stub.ModelStreamInfer(iter([message("nope", "a"), message("nope", "b")]), metadata=METADATA):
        pass
    assert sorted(context.id for context in gateway.contexts) == ["a", "b"]
    assert ends(gateway) == [(STREAM, "alice", "rejected", "not_found")] * 2
    async for _ in stub.ModelStreamInfer(iter([]), metadata=METADATA):
        pass
    assert len(gateway.contexts) == 2


async def test_a_stream_that_is_not_let_in_leaves_one(stub: Any, gateway: Any) -> None:
    with pytest.raises(grpc.aio.AioRpcError):
        await asyncio.wait_for(stub.ModelStreamInfer().read(), 60)
    assert ends(gateway) == [(STREAM, "", "rejected", "unauthenticated")]


@pytest.mark.parametrize("error", [ValueError("broken"), asyncio.CancelledError()])
async def test_what_was_sent_of_a_response_leaves_before_the_error_that_ends_it(
    gateway: Any, caplog: pytest.LogCaptureFixture, error: BaseException
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"part", "more_body": True})
        raise error

    connection = Connection(RequestContextMiddleware(app, gateway))
    await connection.send(request(b""))
    assert connection.transport.written.endswith(b"4\r\npart\r\n")
    assert connection.transport.closed
