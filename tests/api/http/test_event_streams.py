"""Streams of events over a connection, whose items are written where they are made."""

import asyncio
import gc
import inspect
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import pytest

from charonia.api.http.connection import EventStreamResponse
from charonia.core.direct_stream import DirectStream
from charonia.core.errors import CharoniaError

from .test_uvicorn_protocol import Connection, body_of, request, turns


class Encoder:
    """Encodes numbers; one that is in `slow` later."""

    def __init__(self, *slow: int) -> None:
        self.slow = slow
        self.begun: list[Coroutine[Any, Any, bytes]] = []

    def encode_item(self, item: int) -> bytes | Coroutine[Any, Any, bytes]:
        if item not in self.slow:
            return b"<%d>" % item
        self.begun.append(self._encode(item))
        return self.begun[-1]

    async def _encode(self, item: int) -> bytes:
        return b"<%d>" % item

    @property
    def encode_text(self) -> Callable[[str], bytes] | None:
        return None if self.slow else lambda text: b"<%b>" % text.encode()

    def encode_end(self) -> bytes:
        return b"<end>"

    def encode_error(self, error: CharoniaError) -> bytes:
        return b"<error>"


class App:
    """Streams 0 to 3 by `sink` where that takes them; waits after item 1 for `gate`."""

    def __init__(self, encoder: Encoder) -> None:
        self.encoder, self.gate = encoder, asyncio.Event()
        self.taken: list[int] = []

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await body_of(receive)
        response = EventStreamResponse(DirectStream(self._numbers), self.encoder)
        self.response = weakref.ref(response)
        await response(scope, receive, send)

    async def _numbers(self, output: DirectStream[int]) -> AsyncGenerator[int, None]:
        yield 0
        for number in (1, 2):
            assert output.sink is not None
            taken = output.sink(number)
            if number == 1:
                await self.gate.wait()
            if taken:
                self.taken.append(number)
            else:
                yield number
        yield 3


async def begin(app: App) -> Connection:
    connection = Connection(app)
    await connection.send(request(b""))
    return connection


def events(connection: Connection) -> list[bytes]:
    _, _, body = connection.transport.written.partition(b"\r\n\r\n")
    return body.split(b"\r\n")[1::2]


@pytest.mark.parametrize(("slow", "taken"), [((), [1, 2]), ((1,), [2]), ((2,), [1]), ((1, 2, 3), [])])
async def test_items_are_written_in_order_whoever_encodes_them(slow: tuple[int, ...], taken: list[int]) -> None:
    app = App(Encoder(*slow))
    app.gate.set()
    connection = await begin(app)
    assert b"".join(events(connection)) == b"<0><1><2><3><end>"
    assert app.taken == taken


@pytest.mark.parametrize("leaves", [False, True])
async def test_a_stream_leaves_nothing_to_the_collector(leaves: bool) -> None:
    app = App(Encoder())
    gc.disable()
    try:
        connection = await begin(app)
        assert app.response() is not None
        if leaves:
            connection.protocol.connection_lost(None)
        else:
            app.gate.set()
        await turns()
        assert not connection.tasks
        assert app.response() is None
    finally:
        gc.enable()


async def test_an_item_that_a_client_did_not_wait_for_is_encoded_no_further() -> None:
    app = App(Encoder(1))
    connection = await begin(app)
    [encoding] = app.encoder.begun
    connection.protocol.connection_lost(None)
    await turns()
    assert not connection.tasks
    assert inspect.getcoroutinestate(encoding) == inspect.CORO_CLOSED
