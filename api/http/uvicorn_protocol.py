"""HTTP/1.1 by uvicorn and httptools: every override of uvicorn's internals is in this module.

What they change, each for the time it takes of every request or for what a client may do to the server:

- targets that repeat are parsed once, and there is one timer for an idle connection, not one for each request;
- a request starts in the turn of the event loop that completes its head, and gets a task only when it waits;
- complete bodies and responses may pass ASGI's messages by (`direct`), responses of one turn leave together;
- heads, trailers and numbers of chunks are limited, silence within a body too; what is no request is told in JSON;
- offers to speak another protocol are declined, and HTTP/1.0 gets no chunks.

Knows nothing of applications. The range of versions in pyproject.toml is the one that the tests were run with;
`check_uvicorn` compares what the installed one has with what is relied on.
"""

import asyncio
import inspect
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http import HTTPStatus
from socket import socket
from typing import Any

import uvicorn
from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ...core.errors import Unsupported
from ..size_limits import BODY_TIMEOUT
from .direct import EXTENSION
from .eager import start_eagerly
from .error_responses import BodyTimeout
from .request_head import (
    MAX_CHUNKS,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    HttpProtocolError,
    LingeringConnection,
    head_size,
    head_too_large,
    head_without_upgrade,
    parse_target,
    too_many_chunks,
)
from .write_coalescer import WriteCoalescer

_ACCESS_LOG = logging.getLogger("uvicorn.access")
_JOINED_BYTES = 1 << 16
"""Responses up to this size are copied into one piece, larger ones are written apart."""


class HttpServerState(ServerState):
    """What the connections of a server share.

    `body_timeout`: seconds to wait for the next piece of a body. `access_log`: write one while its logger is on.
    """

    _joined_headers: object = None
    _ok = b""

    def __init__(self, body_timeout: float = BODY_TIMEOUT, access_log: bool = True) -> None:
        super().__init__()
        self.coalescer = WriteCoalescer()
        self.body_timeout = body_timeout
        self.access_log = access_log

    def ok_head(self) -> bytes:
        """The status line of 200 and the headers of every response: uvicorn replaces their list each second."""
        if self._joined_headers is not self.default_headers:
            self._joined_headers = self.default_headers
            self._ok = b"HTTP/1.1 200 OK\r\n" + b"".join([b"%b: %b\r\n" % header for header in self.default_headers])
        return self._ok


class Http11Cycle(RequestResponseCycle):
    """One request of HTTP/1.1 and its response; the `DirectCycle` of its scope.

    Responses are sent as messages while there is an access log, and while the client has not read earlier ones.
    """

    direct_send: Send | None = None
    direct_headers = b""
    _body_halted = False

    def __init__(self, connection: "HttpProtocol", version: str) -> None:
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
            "extensions": {EXTENSION: self},
        }
        super().__init__(
            scope,
            connection.transport,
            connection.flow,
            connection.logger,
            connection.access_logger,
            connection.access_log,
            connection.server_state.default_headers,
            asyncio.Event(),
            connection.expect_100_continue,
            version != "1.0" and connection.parser.should_keep_alive(),
            connection.on_response_complete,
        )
        self._state, self._loop = connection.server_state, connection.loop

    async def receive(self) -> Any:
        """ASGI's `receive`. Raises `BodyTimeout` if nothing comes of a body for too long."""
        if not self.more_body or self.response_complete:
            return await super().receive()
        timer = self._loop.call_later(self._state.body_timeout, self._halt_body)
        try:
            message: Any = await super().receive()
        finally:
            timer.cancel()
        # What came in the same moment came in time.
        if self._body_halted and message.get("more_body") and not message["body"]:
            raise BodyTimeout(self._state.body_timeout)
        self._body_halted = False
        return message

    def _halt_body(self) -> None:
        self._body_halted = True
        self.message_event.set()

    def take_complete_body(self) -> bytes | None:
        if self.more_body or self.disconnected:
            return None
        body, self.body = bytes(self.body), bytearray()
        return body

    def send_complete_response(self, head: bytes, parts: Sequence[bytes | memoryview]) -> bool:
        if self.access_log or self.flow.write_paused:
            return False
        if self.disconnected:
            return True
        self.response_started = self.response_complete = True
        end = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        pieces = (self._state.ok_head(), head, end, *parts)
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
            self.expected_content_length = len(message["body"])  # uvicorn compares
        await super().send(message)


class HttpProtocol(HttpToolsProtocol):
    """One connection."""

    server_state: HttpServerState
    _ready: tuple[Http11Cycle, Any] | None = None
    _idle = False
    _idle_since = 0.0
    _received = 0
    _in_head = False
    _head_bytes = 0
    _chunked_cycle: object = None
    _chunks = 0
    _trailing_bytes = 0

    @property
    def access_log(self) -> bool:
        """Whether the access log is wanted now: its logger may be switched while a connection lives."""
        return self.server_state.access_log and _ACCESS_LOG.isEnabledFor(logging.INFO)

    @access_log.setter
    def access_log(self, wanted: bool) -> None:
        pass  # uvicorn asks once, when a connection begins

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._await_request()

    # From bytes to requests

    def data_received(self, data: bytes) -> None:
        coalescer = self.server_state.coalescer
        if self.transport in coalescer:  # what comes of this may be written at once
            coalescer.flush()
        self._received = len(data)
        cycle = self.cycle
        body_bytes = len(cycle.body) if cycle is not None and cycle.more_body else -1
        try:
            self._feed(data)
        except HttpParserError as error:
            self._answer_parser_error(error)
        if self._in_head:
            # What came before the head in the piece that it began in is not counted.
            self._head_bytes = 0 if self._head_bytes < 0 else self._head_bytes + len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._in_head = False
                self._answer_error(head_too_large())
        elif body_bytes >= 0 and cycle.more_body and not cycle.response_complete and len(cycle.body) == body_bytes:
            # None of it was the body's: extensions of a chunk, or trailers.
            self._trailing_bytes += len(data)
            if self._trailing_bytes > MAX_HEAD_BYTES:
                self._answer_error(head_too_large())
        ready, self._ready = self._ready, None
        if ready is not None:
            self._start_asgi_task(*ready)

    def _feed(self, data: bytes) -> None:
        """Give the parser `data`, and a request that offers another protocol a second time, without the offer.

        JDK's HTTP client offers h2c with the first request of every connection. The parser takes such an offer for
        accepted, and what follows, the body first, for the other protocol.
        """
        rest = memoryview(data)
        while True:
            try:
                return self.parser.feed_data(rest)
            except HttpParserUpgrade as offer:
                method, version = self.parser.get_method(), self.parser.get_http_version()
                if method == b"CONNECT":
                    raise HttpParserError from None
                head, rest = head_without_upgrade(method, self.url, version, self.headers), rest[offer.args[0] :]
                self.parser = HttpRequestParser(self)
                self.parser.feed_data(head)

    def _should_upgrade(self) -> bool:
        return True  # uvicorn then waits for the other protocol, and takes nothing for the request's end

    def on_message_begin(self) -> None:
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._in_head, self._head_bytes = True, -1

    def on_headers_complete(self) -> None:
        self._in_head = False
        # A head that came with little else cannot be too long.
        long = self._head_bytes >= 0 or self._received > MAX_HEAD_BYTES
        if len(self.headers) > MAX_HEADERS or (long and head_size(self.url, self.headers) > MAX_HEAD_BYTES):
            raise head_too_large()
        if self.parser.should_upgrade():
            return
        self._idle = False
        version, before = self.parser.get_http_version(), self.cycle
        self.cycle = cycle = (Http10Cycle if version == "1.0" else Http11Cycle)(self, version)
        self.headers = []  # trailers are no headers
        # Only the access log wants to know for whom a proxy asks.
        app: Any = self.app if cycle.access_log else self.config.app
        if before is not None and not before.response_complete:
            self.flow.pause_reading()
            self.pipeline.appendleft((cycle, app))
        else:
            self._ready = cycle, app  # for when all that came together is parsed

    def on_chunk_header(self) -> None:
        """httptools' callback: each chunk has one, the empty one at the end too."""
        if self._chunked_cycle is not self.cycle:
            self._chunked_cycle, self._chunks = self.cycle, 0
        self._trailing_bytes = 0
        self._chunks += 1
        if self._chunks == MAX_CHUNKS + 2:
            self._answer_error(too_many_chunks())

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        task = start_eagerly(cycle.run_asgi(app))
        if task is None:
            cycle.release()
        else:
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
            task.add_done_callback(cycle.release)

    # What becomes no request

    def _answer_parser_error(self, error: HttpParserError) -> None:
        cause = error.__context__  # what a callback raised
        if not isinstance(cause, HttpProtocolError):
            self.logger.warning("Invalid HTTP request received.")
            reason = str(error) or "its method is not served"
            cause = HttpProtocolError(HTTPStatus.BAD_REQUEST, f"Invalid HTTP request received: {reason}")
        self._answer_error(cause)

    def _answer_error(self, error: HttpProtocolError) -> None:
        cycle, started = self.cycle, False
        if cycle is not None and not cycle.response_complete:
            # For the application that has it, the client has left.
            cycle.disconnected, started = True, cycle.response_started
            cycle.message_event.set()
        self.flow.resume_reading()
        if not started:
            self.transport.write(error.answer(STATUS_LINE[error.status]))
        if error.client_still_sends:
            self.transport.set_protocol(LingeringConnection(self, self.transport))
        else:
            self.transport.close()

    # The end of requests and connections. An idle connection is closed after a while, also within a request's head: it
    # costs a file. Its one timer may ring too early, and is not moved with every request.

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        else:
            self._await_request()

    def _await_request(self) -> None:
        self._idle, self._idle_since = True, self.loop.time()
        if self.timeout_keep_alive_task is None:
            later = self.loop.call_later(self.timeout_keep_alive, self.timeout_keep_alive_handler)
            self.timeout_keep_alive_task = later

    def _unset_keepalive_if_required(self) -> None:
        pass

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if not self._idle:
            return
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self.timeout_keep_alive_task = self.loop.call_later(left, self.timeout_keep_alive_handler)
        else:
            super().timeout_keep_alive_handler()

    def eof_received(self) -> None:
        self.server_state.coalescer.flush()

    def shutdown(self) -> None:
        self.server_state.coalescer.flush()
        super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None


class UvicornServer(uvicorn.Server):
    """uvicorn's server, which tells when it listens, and leaves signals alone."""

    def __init__(self, config: uvicorn.Config, state: HttpServerState) -> None:
        super().__init__(config)
        self.server_state = state
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


_METHODS: dict[type, str] = {
    RequestResponseCycle: "run_asgi send receive",
    HttpToolsProtocol: "connection_made connection_lost data_received eof_received shutdown on_message_begin on_url "
    "on_header on_headers_complete on_body on_message_complete on_response_complete timeout_keep_alive_handler "
    "_start_asgi_task _unset_keepalive_if_required _should_upgrade",
    uvicorn.Server: "serve startup capture_signals",
}
"""Methods of uvicorn's classes that are overridden or called here."""

_ATTRIBUTES: dict[type, str] = {
    RequestResponseCycle: "scope transport flow access_log message_event on_response keep_alive body more_body "
    "disconnected response_started response_complete chunked_encoding expected_content_length",
    HttpToolsProtocol: "config app loop logger access_logger access_log parser timeout_keep_alive "
    "timeout_keep_alive_task server_state tasks transport flow server client scheme pipeline headers cycle",
    ServerState: "total_requests tasks default_headers",
    uvicorn.Server: "server_state should_exit",
}
"""Attributes that their constructors set."""

_CYCLE_ARGUMENTS = (
    "scope transport flow logger access_logger access_log default_headers message_event expect_100_continue keep_alive "
    "on_response"
)


def check_uvicorn() -> None:
    """Compare the installed uvicorn with what this module relies on.

    Raises:
        Unsupported: they do not fit together; the message names what is missing.
    """
    wanted = [(kind, name, dir(kind)) for kind, names in _METHODS.items() for name in names.split()]
    for kind, names in _ATTRIBUTES.items():
        set_there = kind.__init__.__code__.co_names  # type: ignore[misc]
        wanted += [(kind, name, set_there) for name in names.split()]
    missing = [f"{kind.__name__}.{name}" for kind, name, there in wanted if name not in there]
    if list(inspect.signature(RequestResponseCycle).parameters) != _CYCLE_ARGUMENTS.split():
        missing.append("the constructor of RequestResponseCycle")
    if missing:
        text = f"uvicorn {uvicorn.__version__} cannot be used, it lacks or has changed: {', '.join(missing)}"
        raise Unsupported(f"{text} (install a version that charonia's requirements name)")
