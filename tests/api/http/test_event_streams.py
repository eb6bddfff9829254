"""Streams of events over a connection, whose items are written where they are made."""

import asyncio
import gc
import inspect
import weakref
from collections.abc import AsyncGenerator, Coroutine
from typing import Any

import pytest

from charonia.api.http.connection import EventStreamResponse
from charonia.api.http.response_parts import MOST_PARTS, MOST_TEXT, TextEncoder, TextEvent
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
    def encode_text(self) -> TextEncoder | None:
        return None if self.slow else lambda text, tokens, logprob: b"<%b>" % text.encode()

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


class TextApp(App):
    """Offers texts to the sink of texts after the first item, until one is left; waits for `gate` behind them."""

    def __init__(self, *texts: str) -> None:
        super().__init__(Encoder())
        self.texts = texts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await body_of(receive)
        await EventStreamResponse(DirectStream(self._texts), AroundTexts())(scope, receive, send)

    async def _texts(self, output: DirectStream[int]) -> AsyncGenerator[int, None]:
        yield 0
        self.sink = output.text_sink
        assert self.sink is not None
        self.taken = [self.sink(text, 1, None) for text in self.texts].count(True)
        await self.gate.wait()
        yield 3


class AroundTexts(Encoder):
    encode_text = TextEvent(b"<before ", b" behind>")  # type: ignore[assignment]


async def test_the_event_of_a_text_is_written_around_its_json() -> None:
    texts = ["", "a", 'say "b"\n', "\u00e9\U0001f600", "x" * MOST_TEXT]
    app = TextApp(*texts, "x" * (MOST_TEXT + 1))
    connection = await begin(app)
    assert app.taken == len(texts), "one that is longer goes the way of other items"
    app.gate.set()
    await turns()
    expected = [b"<0>", *(AroundTexts.encode_text(text, 1, None) for text in texts), b"<3>", b"<end>"]
    assert events(connection) == [*filter(None, expected), b""]
    assert expected[3] == b'<before "say \\"b\\"\\n" behind>'


async def test_no_text_is_taken_while_the_client_does_not_read_or_when_the_response_is_over() -> None:
    app = TextApp("a")
    connection = await begin(app)
    assert app.sink is not None
    connection.protocol.pause_writing()
    assert not app.sink("b", 1, None)
    connection.protocol.resume_writing()
    assert app.sink("c", 1, None)
    app.gate.set()
    await turns()
    assert not app.sink("d", 1, None)
    await turns()
    assert b"".join(events(connection)) == b'<0><before "a" behind><before "c" behind><3><end>'


async def test_long_texts_go_the_way_of_items_though_the_client_did_not_read_at_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    app = TextApp()
    connection = Connection(app)
    write = connection.transport.write

    def write_and_pause(data: bytes) -> None:
        write(data)
        connection.protocol.pause_writing()

    with monkeypatch.context() as patch:
        patch.setattr(connection.transport, "write", write_and_pause)
        await connection.send(request(b""))
        connection.protocol.resume_writing()
        await turns()
    connection.protocol.resume_writing()
    assert app.sink is not None
    assert app.sink("a", 1, None)
    assert not app.sink("x" * (MOST_TEXT + 1), 1, None)
    app.gate.set()
    await turns()
    assert b"".join(events(connection)) == b'<0><before "a" behind><3><end>'


async def test_the_texts_of_many_streams_leave_when_enough_of_them_wait() -> None:
    app = TextApp(*["a"] * (MOST_PARTS + 1))
    connection = await begin(app)
    assert app.taken == MOST_PARTS + 1
    assert connection.transport.written.count(b"before") == MOST_PARTS + 1
    app.gate.set()
    await turns()
