"""Streams of server-sent events that tell the client, while there is nothing to send, that they are alive."""

import asyncio
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import NamedTuple, Self, TypeVar

from starlette.types import Message, Receive, Scope, Send

from ...core.errors import CharoniaError
from ...core.gateway import ResponseStream
from .connection import EventEncoder, EventStreamResponse
from .request_context import record_error
from .request_cycle import Http11Cycle, chunk_writer

T = TypeVar("T")


class KeepAlive(NamedTuple):
    """The event that is sent whenever nothing else was for so many seconds."""

    event: bytes
    seconds: float


class KeepAliveSender:
    """An ASGI `send` that sends the event of `keep_alive` in pauses, after what `start` makes if nothing was sent yet.

    `begun`: it has; another start is dropped.
    """

    def __init__(self, send: Send, start: Callable[[], Message], keep_alive: KeepAlive) -> None:
        self.send = send
        self._start = start
        self._keep_alive = keep_alive
        self.cycle: Http11Cycle | None = None
        """What writes past this sender, if anything does."""
        self._written = 0
        self._quiet = True
        self._ended = False
        self._sending: asyncio.Task[None] | None = None
        self.begun = False

    async def __aenter__(self) -> Self:
        self._timer = asyncio.get_running_loop().call_later(self._keep_alive.seconds, self._tick)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._timer.cancel()
        if self._sending is not None:
            self._sending.cancel()

    async def __call__(self, message: Message) -> None:
        self._quiet = False
        if message["type"] == "http.response.start":
            if self.begun:
                return
            self.begun = True
        self._ended = self._ended or (message["type"] == "http.response.body" and not message.get("more_body"))
        await self.send(message)

    def _tick(self) -> None:
        written = 0 if self.cycle is None else self.cycle.chunks_written
        quiet = self._quiet and written == self._written
        if quiet and (self._sending is None or self._sending.done()):
            self._sending = asyncio.create_task(self._send_event())
        self._quiet, self._written = True, written
        self._timer = asyncio.get_running_loop().call_later(self._keep_alive.seconds, self._tick)

    async def _send_event(self) -> None:
        if self._ended:
            return
        if not self.begun:
            self.begun = True
            await self.send(self._start())
        await self.send({"type": "http.response.body", "body": self._keep_alive.event, "more_body": True})


class KeepAliveStreamResponse(EventStreamResponse[T]):
    """A stream that begins with the event of `keep_alive` if its first item is late. An error before that item is then
    one of the stream, and no response of its own."""

    def __init__(
        self,
        items: ResponseStream[T],
        encoder: EventEncoder[T],
        keep_alive: KeepAlive,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(items, encoder, headers)
        self._keep_alive = keep_alive

    def _chunk_writer(self, scope: Scope, send: Send) -> Http11Cycle | None:
        assert isinstance(send, KeepAliveSender)
        send.cycle = chunk_writer(scope, send.send)
        return send.cycle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with KeepAliveSender(send, lambda: self._start(scope), self._keep_alive) as sender:
            try:
                await super().__call__(scope, receive, sender)
            except (Exception, asyncio.CancelledError) as error:
                if not sender.begun:
                    raise
                if isinstance(error, CharoniaError):
                    record_error(scope, error)
                events = self._error_events(scope, error)
                if events is None:
                    raise
                await sender({"type": "http.response.body", "body": events, "more_body": False})
