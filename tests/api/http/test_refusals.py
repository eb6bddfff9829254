"""A full queue is told before a request's body is read, over real connections."""

import asyncio
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest

from charonia.api.app import build_app
from charonia.api.http.server import HttpServer
from charonia.api.metadata import ServerInfo
from charonia.core.errors import QueueFull
from charonia.core.request_context import QUEUE_FULL_ENDS


@pytest.fixture
async def port(gateway: Any) -> AsyncIterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = HttpServer(build_app(gateway, ServerInfo()), sock, access_log=False)
        await server.start()
        yield sock.getsockname()[1]
        await server.stop()


def head(path: str, length: int, *lines: str) -> bytes:
    return "\r\n".join([f"POST {path} HTTP/1.1", "host: x", f"content-length: {length}", *lines, "", ""]).encode()


@pytest.mark.parametrize(
    "path",
    [
        "/v1/completions",
        "/v1/chat/completions",
        "/v1/responses",
        "/v1/messages",
        "/v2/models/llm/generate",
        "/v2/models/llm/generate_stream",
        "/v2/models/numbers/infer",
    ],
)
async def test_a_full_queue_is_told_at_the_end_of_the_head(port: int, gateway: Any, path: str) -> None:
    """The connection serves on: what comes of the body is read over."""
    gateway.full = QueueFull("9 requests are waiting already", retry_after=3)
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head(path, 100_000))
        answer = await reader.readuntil(b"\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
        assert b"\r\nretry-after: 3\r\n" in answer
        assert b"connection: close" not in answer
        assert b"9 requests are waiting already" in await reader.readuntil(b"}")
        gateway.full = None
        body = b'{"text_input": "x"}'
        writer.write(bytes(100_000) + head("/v2/models/llm/generate", len(body)) + body)
        assert b"HTTP/1.1 200 OK" in await reader.readuntil(b"\r\n\r\n")
        writer.close()
    assert len(gateway.asked) == 1
    assert gateway.contexts[0].end == QUEUE_FULL_ENDS["requests"]


async def test_who_waits_to_be_asked_for_the_body_is_not_asked(port: int, gateway: Any) -> None:
    """It may send the body all the same, or another request: nobody could tell which."""
    gateway.full = QueueFull("9 requests are waiting already", retry_after=3)
    async with asyncio.timeout(30):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(head("/v1/completions", 100_000, "expect: 100-continue"))
        answer = await reader.read()
        writer.close()
    assert answer.startswith(b"HTTP/1.1 429 Too Many Requests\r\n")
    assert b"\r\nconnection: close\r\n" in answer
