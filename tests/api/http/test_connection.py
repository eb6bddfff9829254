"""What happens when the client leaves."""

import asyncio
import gc
import weakref
from collections.abc import AsyncGenerator
from typing import Any

import pytest
from starlette.types import Message

from charonia.api.app import build_app
from charonia.api.http.connection import EventStreamResponse
from charonia.api.http.keep_alive import KeepAlive, KeepAliveStreamResponse
from charonia.api.metadata import ServerInfo
from charonia.core.errors import CharoniaError

PATHS = [
    ("/v2/models/llm/generate", b'{"text_input": "x"}'),
    ("/v2/models/llm/generate_stream", b'{"text_input": "x"}'),
    ("/v1/completions", b'{"model": "llm", "prompt": "x"}'),
    ("/v1/completions", b'{"model": "llm", "prompt": ["x", "y"], "stream": true}'),
    ("/v1/chat/completions", b'{"model": "llm", "messages": [{"role": "user", "content": "x"}], "stream": true}'),
]


class Visitor:
    """An ASGI client that sends a body, and leaves when told to."""

    def __init__(self, body: bytes) -> None:
        self.sent: list[Message] = []
        self.leave = asyncio.Event()
        self._body: bytes | None = body

    async def receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.leave.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Message) -> None:
        self.sent.append(message)


def scope(path: str) -> dict[str, Any]:
    return {
        "type": "http",
        "method": "POST",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [],
        "http_version": "1.1",
        "scheme": "http",
        "server": ("charonia", 80),
    }


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_leaving_closes_the_stream_at_once(gateway: Any, path: str, body: bytes) -> None:
    gateway.texts, gateway.hang = (), True
    visitor = Visitor(body)
    app = build_app(gateway, ServerInfo())
    request = asyncio.create_task(app(scope(path), visitor.receive, visitor.send))
    await gateway.waiting.wait()
    assert gateway.open_streams >= 1
    visitor.leave.set()
    await request
    assert gateway.open_streams == 0
    assert [message for message in visitor.sent if message.get("status") != 499 and message.get("body")] == []


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_leaving_while_sending_the_body(gateway: Any, path: str, body: bytes) -> None:
    visitor = Visitor(body)
    visitor._body = None
    visitor.leave.set()
    await build_app(gateway, ServerInfo())(scope(path), visitor.receive, visitor.send)
    assert not gateway.asked


@pytest.mark.parametrize(("path", "body"), PATHS)
async def test_no_task_stays_behind(gateway: Any, path: str, body: bytes) -> None:
    visitor = Visitor(body)
    await build_app(gateway, ServerInfo())(scope(path), visitor.receive, visitor.send)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert visitor.sent[0]["status"] == 200


async def test_cancelling_a_request_is_not_taken_for_a_disconnect(gateway: Any) -> None:
    gateway.texts, gateway.hang = (), True
    visitor = Visitor(PATHS[0][1])
    app = build_app(gateway, ServerInfo())
    request = asyncio.create_task(app(scope(PATHS[0][0]), visitor.receive, visitor.send))
    await gateway.waiting.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    assert gateway.open_streams == 0


class Item:
    """What a stream yields; its memory is to be given back with it."""


class Encoder:
    def encode_item(self, item: Item) -> bytes:
        return b"item"

    def encode_end(self) -> bytes:
        return b"end"

    def encode_error(self, error: CharoniaError) -> bytes:
        return b"error"


@pytest.mark.parametrize("alive", [False, True])
async def test_nothing_is_left_to_the_collector_when_a_client_leaves(alive: bool) -> None:
    visitor, items = Visitor(b""), []

    async def stream() -> AsyncGenerator[Item, None]:
        item = Item()
        items.append(weakref.ref(item))
        yield item
        await asyncio.Event().wait()

    def response() -> EventStreamResponse[Item]:
        if alive:
            return KeepAliveStreamResponse(stream(), Encoder(), KeepAlive(b"ping", 60))
        return EventStreamResponse(stream(), Encoder())

    async def leave() -> None:
        request = asyncio.create_task(response()({"type": "http"}, visitor.receive, visitor.send))
        while not items:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        visitor.leave.set()
        await request

    await visitor.receive()
    gc.disable()
    try:
        await leave()
        await asyncio.sleep(0)
        assert items[0]() is None
    finally:
        gc.enable()
