"""Requests whose bodies come to a halt, over real connections: every endpoint says so, and slow ones are served."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from charonia.api.app import build_app
from charonia.api.http.server import HttpServer
from charonia.api.metadata import ServerInfo
from charonia.api.triton.clouds import CloudMiddleware
from charonia.cli.options import CloudOptions, HttpOptions
from charonia.cli.plan import parse_clouds, parse_http_rules
from charonia.core.request_context import Outcome

TEXT = "the request body is incomplete: nothing more of it came for 0.2 s"
OPENAI = {"message": TEXT, "type": "invalid_request_error", "param": None, "code": None}
RULES = parse_http_rules(HttpOptions(http_body_timeout_secs=0.2))


@pytest.fixture
async def ports(gateway: Any) -> AsyncIterator[tuple[int, int]]:
    """The ports of HTTP and of a cloud."""
    app = build_app(gateway, ServerInfo(), rules=RULES)
    [cloud] = parse_clouds(CloudOptions(allow_sagemaker="true"), {"SAGEMAKER_TRITON_DEFAULT_MODEL_NAME": "numbers"})
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        in_cloud = CloudMiddleware(app, cloud, lambda: ["numbers"])
        servers = [
            HttpServer(each, sock, False, None, RULES.body_timeout) for each, sock in ((app, one), (in_cloud, other))
        ]
        for server in servers:
            await server.start()
        yield one.getsockname()[1], other.getsockname()[1]
        for server in servers:
            await server.stop()


async def halted(port: int, path: str, *headers: str) -> tuple[bytes, Any]:
    """The status line and what the body says, of a request half of which is sent; the connection is closed after it."""
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        lines = "\r\n".join([f"POST {path} HTTP/1.1", "host: x", *headers, "", '{"text_input": "x'])
        writer.write(lines.encode())
        answer = await reader.read()
        writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"connection: close" in head
    return head.split(b"\r\n")[0], json.loads(body)


async def test_every_endpoint_tells_who_stops_half_way(ports: tuple[int, int], gateway: Any) -> None:
    http, cloud = ports
    length = "content-length: 1000"
    v2 = [
        halted(http, "/v2/models/numbers/infer", length),
        halted(http, "/v2/models/numbers/infer", length, "inference-header-content-length: 500"),
        halted(http, "/v2/models/llm/generate", length),
        halted(http, "/v2/models/llm/generate_stream", "transfer-encoding: chunked", "", "ff"),
        halted(http, "/v2/repository/models/llm/load", length),
        halted(cloud, "/invocations", length),
    ]
    openai = [halted(http, path, length) for path in ("/v1/chat/completions", "/v1/embeddings", "/tokenize")]
    answers = await asyncio.gather(*v2, *openai)
    status = b"HTTP/1.1 408 Request Timeout"
    assert answers == [(status, {"error": TEXT})] * len(v2) + [(status, {"error": OPENAI})] * len(openai)
    assert not gateway.asked
    assert {context.end.outcome for context in gateway.contexts} == {Outcome.REJECTED}


async def test_a_stream_may_be_silent(ports: tuple[int, int], gateway: Any) -> None:
    gateway.hang = True
    head = b"POST /v2/models/llm/generate_stream HTTP/1.1\r\nhost: x\r\ncontent-length: 19\r\n\r\n"
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", ports[0])
        writer.write(head + b'{"text_input": "x"}')
        await gateway.waiting.wait()
        await asyncio.sleep(0.5)
        assert gateway.open_streams == 1
        assert b" two" in await reader.read(1000)
        writer.close()
