"""Streams that have nothing to send yet: the event that keeps them alive, and what goes wrong after it."""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any

import pytest

from charonia.api.http.keep_alive import KeepAlive, KeepAliveStreamResponse
from charonia.core.errors import CharoniaError, Internal, ServerExiting

PING = b"event: ping\n\n"


class Encoder:
    def encode_item(self, item: bytes) -> bytes:
        return item

    encode_text = None

    def encode_end(self) -> bytes:
        return b"end"

    def encode_error(self, error: CharoniaError) -> bytes:
        return f"error: {error.message}".encode()


class Client:
    """Collects what is sent, and stays. `seen(part)` waits until a part of the body has come."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        self._news = asyncio.Event()

    async def receive(self) -> Any:
        await asyncio.Event().wait()

    async def send(self, message: Any) -> None:
        self.messages.append(message)
        self._news.set()

    @property
    def parts(self) -> list[bytes]:
        return [message["body"] for message in self.messages if message["type"] == "http.response.body"]

    async def seen(self, part: bytes, times: int = 1) -> None:
        async with asyncio.timeout(30):
            while self.parts.count(part) < times:
                self._news.clear()
                await self._news.wait()


def answering(stream: AsyncGenerator[bytes, None], client: Client, seconds: float = 0.001) -> "asyncio.Task[None]":
    response = KeepAliveStreamResponse(stream, Encoder(), KeepAlive(PING, seconds))
    scope: Any = {"type": "http"}
    return asyncio.create_task(response(scope, client.receive, client.send))


async def until(event: asyncio.Event, error: BaseException | None = None) -> AsyncGenerator[bytes, None]:
    await event.wait()
    if error is not None:
        raise error
    yield b"one"
    yield b"two"


async def test_pauses_have_events_and_the_response_one_beginning() -> None:
    client, go = Client(), asyncio.Event()
    task = answering(until(go), client)
    await client.seen(PING, times=2)
    go.set()
    await task
    assert [message["type"] for message in client.messages].count("http.response.start") == 1
    assert client.messages[0]["status"] == 200
    assert [part for part in client.parts if part != PING] == [b"one", b"two", b"end"]
    assert [message["more_body"] for message in client.messages[1:]] == [True] * (len(client.parts) - 1) + [False]


async def test_a_stream_that_is_in_time_has_none() -> None:
    client, go = Client(), asyncio.Event()
    go.set()
    await answering(until(go), client, seconds=1000)
    assert client.parts == [b"one", b"two", b"end"]


@pytest.mark.parametrize(
    ("error", "told"), [(Internal("oh"), b"error: oh"), (ValueError("x"), b"error: Internal Server Error")]
)
async def test_an_error_after_it_is_one_of_the_stream(error: Exception, told: bytes) -> None:
    client, go = Client(), asyncio.Event()
    task = answering(until(go, error), client)
    await client.seen(PING)
    go.set()
    await task
    assert (client.parts[-1], client.messages[-1]["more_body"]) == (told, False)


async def test_an_error_before_it_is_a_response_of_its_own() -> None:
    client, go = Client(), asyncio.Event()
    go.set()
    with pytest.raises(Internal, match="oh"):
        await answering(until(go, Internal("oh")), client, seconds=1000)
    assert client.messages == []


async def test_the_exit_of_the_server_is_told_and_a_cancellation_is_not() -> None:
    for reason, told in ((ServerExiting(), b"error: Server exiting"), (None, PING)):
        client = Client()
        task = answering(until(asyncio.Event()), client)
        await client.seen(PING)
        task.cancel(reason)
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled() == (reason is None)
        assert client.parts[-1] == told
