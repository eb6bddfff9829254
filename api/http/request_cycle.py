"""One HTTP request and its response, by uvicorn's cycle of both, and the way past ASGI's messages for what is complete.

A body that has come whole, and a response that is made whole, need no messages. The cycle is the extension
`charonia.direct` of the scope. The way is closed where middleware replaced `send` or `receive`; `add_response_header`
keeps it open.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVarTuple

import orjson
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ...core.direct_stream import TextSink
from ...core.logprobs import TokenLogprob
from ..size_limits import BODY_TIMEOUT, SLOW_BODY_BYTES, SLOW_BODY_SECONDS
from .error_responses import BodyTimeout, BodyTooSlow
from .request_head import parse_target
from .response_parts import MOST_PARTS, MOST_TEXT, ChunkHeads, TextEvent, WriteCoalescer

Ts = TypeVarTuple("Ts")

_EXTENSION = "charonia.direct"
_ACCESS_LOG = logging.getLogger("uvicorn.access")
_JOINED_BYTES = 1 << 16
"""Responses up to this size are copied into one piece, larger ones are written apart."""


class HttpServerState(ServerState):
    """The state that the connections of a server share. `body_timeout`: seconds to wait for the next piece of a body.
    `access_log`: write one while its logger is on."""

    _joined_headers: object = None
    _ok = b""

    def __init__(self, body_timeout: float = BODY_TIMEOUT, access_log: bool = True) -> None:
        super().__init__()
        self.coalescer = WriteCoalescer(self.connections)
        self.body_timeout = body_timeout
        self._access_log = access_log

    @property
    def access_log(self) -> bool:
        """Whether the access log is wanted now: its logger may be switched while a connection lives."""
        return self._access_log and _ACCESS_LOG.isEnabledFor(logging.INFO)

    def head_of(self, status: int) -> bytes:
        """The status line and the headers of every response: uvicorn replaces their list each second."""
        if self._joined_headers is not self.default_headers:
            self._joined_headers = self.default_headers
            self._ok = STATUS_LINE[200] + b"".join([b"%b: %b\r\n" % header for header in self.default_headers])
        return self._ok if status == 200 else STATUS_LINE[status] + self._ok[len(STATUS_LINE[200]) :]


class MessageEvent:
    """Set when there is a message for the application, or the client has left; calls `on_set` then. What most requests
    never wait for is made when one does."""

    on_set: Callable[[], None] | None = None
    _is_set = False
    _awaited: asyncio.Event | None = None

    def set(self) -> None:
        self._is_set = True
        if self._awaited is not None:
            self._awaited.set()
        if self.on_set is not None:
            self.on_set()

    def clear(self) -> None:
        self._is_set = False
        if self._awaited is not None:
            self._awaited.clear()

    async def wait(self) -> None:
        if not self._is_set:
            self._awaited = self._awaited or asyncio.Event()
            await self._awaited.wait()


class Http11Cycle(RequestResponseCycle):
    """One request of HTTP/1.1 and its response.

    `direct_send`: what stands for the cycle's own `send`, None for that itself; `direct_headers`: lines that it adds.
    Responses are sent as messages while there is an access log, and while the client has not read earlier ones.
    """

    direct_send: Send | None = None
    direct_headers = b""
    message_event: MessageEvent  # type: ignore[assignment]
    chunks_written = 0
    """Parts of the response that were written as soon as they were there."""
    _body_halted = False
    # Of the body, since its pace was last judged: bytes, and seconds in which they were waited for.
    _paced_bytes = 0
    _paced_seconds = 0.0

    def __init__(self, connection: HttpToolsProtocol, state: HttpServerState, version: str) -> None:
        target = parse_target(connection.url)
        scope: Any = {
            "type": "http",
            "asgi": {"version": connection.config.asgi_version, "spec_version": "2.3"},
            "http_version": version,
            "method": connection.parser.get_method().decode("ascii"),
            "scheme": connection.scheme or "http",
            "path": target.path,
            "raw_path": target.raw_path,
            "query_string": target.query,
            "root_path": "",
            "headers": connection.headers,
            "server": connection.server,
            "client": connection.client,
            "state": {},
            "extensions": {_EXTENSION: self},
        }
        event: Any = MessageEvent()
        keep_alive = version != "1.0" and connection.parser.should_keep_alive()
        super().__init__(
            scope, connection.transport, connection.flow, connection.logger, connection.access_logger,
            state.access_log, state.default_headers, event, connection.expect_100_continue, keep_alive,
            connection.on_response_complete,
        )  # fmt: skip
        self._state, self._loop = state, connection.loop

    async def send(self, message: Any) -> None:
        """ASGI's `send`."""
        if message.get("more_body") and self.takes_chunks and self.scope["method"] != "HEAD":
            self.write_chunk(message.get("body", b""))
            return
        self.flush()
        await super().send(message)

    def flush(self) -> None:
        """Write the part of the response that waits for the end of the turn, if there is one."""
        self._state.coalescer.flush_for(self.transport)

    @property
    def takes_chunks(self) -> bool:
        """Whether a part of the response may be written now: it has begun, is in chunks, and the client reads."""
        return bool(self.chunked_encoding) and not (self.flow.write_paused or self.response_complete)

    def sink(self, encode: Callable[[*Ts], bytes | None]) -> Callable[[*Ts], bool]:
        """What writes the part of the response that `encode` makes of an item, if that may be written now; not what it
        leaves, as None. Made once for a response: what a part costs is counted in function calls."""
        flow = self.flow
        transport = self.transport
        coalescer = self._state.coalescer
        parts = coalescer.parts

        def write(*item: *Ts) -> bool:
            if flow.write_paused or self.response_complete or not self.chunked_encoding:
                return False
            if not self.disconnected:
                body = encode(*item)
                if body is None:
                    return False
                if body:  # an empty chunk would be the last
                    self.chunks_written += 1
                    parts.append((transport, b"%x\r\n%b\r\n" % (len(body), body)))
                    if len(parts) == 1 or len(parts) == MOST_PARTS:
                        coalescer.bound(len(parts), MOST_PARTS)
            return True

        return write

    def text_sink(self, event: TextEvent) -> TextSink:
        """As `sink`, of a response in chunks that has begun: what writes the event of a text, unless that is long."""
        flow = self.flow
        transport = self.transport
        coalescer = self._state.coalescer
        parts = coalescer.parts
        heads = ChunkHeads(event)
        before = event.before
        behind = event.behind + b"\r\n"
        tail = event.tail
        encode = orjson.dumps

        def write(text: str, tokens: int, logprob: TokenLogprob | None) -> bool:
            if not text:
                return tail is None
            if flow.write_paused or self.response_complete or len(text) > MOST_TEXT:
                return False
            data = encode(text)
            if tail is None:
                chunk = heads[len(data)] + data + behind
            else:
                end = tail(tokens, logprob)
                chunk = b"%x\r\n%b%b%b\r\n" % (len(before) + len(data) + len(end), before, data, end)
            self.chunks_written += 1
            parts.append((transport, chunk))
            waiting = len(parts)
            if waiting == 1 or waiting == MOST_PARTS:
                coalescer.bound(waiting, MOST_PARTS)
            return True

        return write

    def write_chunk(self, body: bytes) -> None:
        """Write a part of the response when the turn of the event loop ends."""
        if body and not self.disconnected:  # an empty chunk would be the last
            self.chunks_written += 1
            self._state.coalescer.write_part(self.transport, b"%x\r\n%b\r\n" % (len(body), body))

    async def receive(self) -> Any:
        """ASGI's `receive`. Raises `BodyTimeout` if nothing comes of a body for too long, or too little."""
        if not self.more_body or self.response_complete:
            return await super().receive()
        began = self._loop.time()
        timer = self._loop.call_later(self._state.body_timeout, self._halt_body)
        try:
            message: Any = await super().receive()
        finally:
            timer.cancel()
        # What came in the same moment came in time.
        if self._body_halted and message.get("more_body") and not message["body"]:
            raise BodyTimeout(self._state.body_timeout)
        self._body_halted = False
        if message.get("more_body"):
            self._check_pace(len(message["body"]), self._loop.time() - began)
        return message

    def _check_pace(self, size: int, waited: float) -> None:
        """Count what came of the body. Raises `BodyTooSlow`."""
        self._paced_bytes += size
        self._paced_seconds += waited
        if self._paced_seconds >= SLOW_BODY_SECONDS:
            if self._paced_bytes < SLOW_BODY_BYTES:
                raise BodyTooSlow(self._paced_bytes, self._paced_seconds)
            self._paced_bytes, self._paced_seconds = 0, 0.0

    def _halt_body(self) -> None:
        self._body_halted = True
        self.message_event.set()

    def watch_client(self, on_left: Callable[[], None] | None) -> None:
        """Have `on_left` called as soon as the client leaves before its response is complete; None: no longer."""

        def on_set() -> None:
            if self.disconnected and on_left is not None:
                on_left()

        self.message_event.on_set = None if on_left is None else on_set
        if on_left is not None:
            self.flow.resume_reading()  # a long body has paused it, and an end that is not read is not told

    def sends_by(self, send: Send) -> bool:
        """Whether `send` is this cycle's, and nothing between the two would change a message."""
        return send == self.send if self.direct_send is None else send is self.direct_send

    def send_complete_response(
        self, send: Send, head: bytes, parts: Sequence[bytes | memoryview], status: int = 200
    ) -> bool:
        """Send a response past `send`; False if messages have to do it."""
        if not self.sends_by(send) or self.access_log or self.flow.write_paused:
            return False
        if self.disconnected:
            return True
        self.response_started = self.response_complete = True
        # Who waits to be asked for the body may send it, or something else instead.
        self.keep_alive = self.keep_alive and not self.waiting_for_100_continue
        end = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        pieces = (self._state.head_of(status), head, self.direct_headers, end, *parts)
        if self.keep_alive and sum(map(len, pieces)) < _JOINED_BYTES:
            self._state.coalescer.write_soon(self.transport, b"".join(pieces))
        else:
            self._state.coalescer.flush()
            self.transport.writelines(pieces)
            if not self.keep_alive:
                self.transport.close()
        self.message_event.set()
        self.on_response()
        return True

    def release(self, _: object = None) -> None:
        """Break the reference cycles of a request that has ended."""
        self.scope.pop("extensions", None)
        self.direct_send = None


class Http10Cycle(Http11Cycle):
    """A request of HTTP/1.0, which has no chunks: a body of unknown length ends where its connection does."""

    _has_length = True

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._has_length = any(name.lower() == b"content-length" for name, _ in message["headers"])
            self.chunked_encoding = None if self._has_length else False
        elif not self._has_length:
            self.expected_content_length = len(message.get("body", b""))  # uvicorn compares
        await super().send(message)


# For applications and middleware


def cycle_behind(receive: Receive) -> Http11Cycle | None:
    """The cycle whose own `receive` this is."""
    cycle = getattr(receive, "__self__", None)
    return cycle if isinstance(cycle, Http11Cycle) else None


def _cycle_of(scope: Scope) -> Http11Cycle | None:
    extensions = scope.get("extensions")
    cycle: Http11Cycle | None = extensions.get(_EXTENSION) if extensions else None
    return cycle


def take_complete_body(scope: Scope, receive: Receive) -> bytes | None:
    """The request's body, if all of it has come and `receive` would give it unchanged; it is not received then."""
    cycle = _cycle_of(scope)
    if cycle is None or receive != cycle.receive or cycle.more_body or cycle.disconnected:
        return None
    body, cycle.body = bytes(cycle.body), bytearray()
    return body


def send_complete_response(
    scope: Scope, send: Send, head: bytes, parts: Sequence[bytes | memoryview], status: int = 200
) -> bool:
    """Send a whole response: the lines of its headers, content-length among them, and its body. False:
    nothing was sent, as `send` would change it, or the access log or a slow reader wants messages."""
    cycle = _cycle_of(scope)
    return cycle is not None and cycle.send_complete_response(send, head, parts, status)


def chunk_writer(scope: Scope, send: Send) -> Http11Cycle | None:
    """The cycle that writes parts of a response past `send`; None where `send` would change them."""
    cycle = _cycle_of(scope)
    return cycle if cycle is not None and cycle.sends_by(send) else None


def flush_parts(scope: Scope) -> None:
    """Write the parts of the response that wait for the end of the turn."""
    cycle = _cycle_of(scope)
    if cycle is not None:
        cycle.flush()


async def send_response(response: Response, scope: Scope, receive: Receive, send: Send) -> None:
    """Send a response that is made whole, in one piece where the server can: each write to a connection is a third of
    what a refusal costs."""
    head = b"".join([b"%b: %b\r\n" % header for header in response.raw_headers])
    if "connection" in response.headers or not send_complete_response(
        scope, send, head, (response.body,), response.status_code
    ):
        await response(scope, receive, send)


def add_response_header(scope: Scope, send: Send, name: bytes, value: bytes) -> Send:
    """A `send` that adds a header to the response, and to one that is sent past it."""

    # No coroutine of its own: it would cost every frame of every stream.
    def send_with_header(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (name, value)]
        return send(message)

    cycle = _cycle_of(scope)
    if cycle is not None and cycle.sends_by(send):
        cycle.direct_send = send_with_header
        cycle.direct_headers += b"%b: %b\r\n" % (name, value)
    return send_with_header


def response_started(scope: Scope) -> bool:
    """The status of the response may be on its way; True only where the protocol tells."""
    cycle = _cycle_of(scope)
    return cycle is not None and cycle.response_started
