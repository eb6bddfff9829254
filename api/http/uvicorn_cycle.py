"""One request over HTTP and its response: uvicorn's, with a limit to silence within a body, and for what is whole a way
past ASGI's messages.

Knows nothing of applications and of how a connection goes on.
"""

import asyncio
import re
from collections.abc import Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import Any, NamedTuple
from urllib.parse import unquote

from httptools import parse_url
from starlette.types import Receive
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from .error_responses import BodyTimeout
from .http10 import UnchunkedCycle
from .protocol_errors import HttpProtocolError
from .write_coalescer import WriteCoalescer

_LONGEST_KNOWN = 256
"""Targets that are remembered: how many, and up to what length."""

_JOINED = 1 << 16
"""Bytes up to which it is cheaper to copy them than to write them apart."""


_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


class Http11Cycle(RequestResponseCycle):
    """Of HTTP/1.1. Who answers finds it by `cycle_of`. `body_timeout`: seconds to wait for the next piece of a body."""

    _silent = False

    def __init__(
        self, connection: HttpToolsProtocol, version: str, outbox: WriteCoalescer, body_timeout: float
    ) -> None:
        super().__init__(
            _scope(connection, version),
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
        self._outbox = outbox
        self._later = connection.loop.call_later
        self._body_timeout = body_timeout

    async def receive(self) -> Any:
        """ASGI's. Raises `BodyTimeout` if nothing comes of a body for too long."""
        if not self.more_body or self.response_complete:
            return await super().receive()
        timer = self._later(self._body_timeout, self._give_up)
        try:
            message: Any = await super().receive()
        finally:
            timer.cancel()
        # What came in the same moment came in time.
        if self._silent and message.get("more_body") and not message["body"]:
            raise BodyTimeout(self._body_timeout)
        self._silent = False
        return message

    def _give_up(self) -> None:
        self._silent = True
        self.message_event.set()

    def take_complete_body(self) -> bytes | None:
        """The body, if all of it is there; then nobody needs to receive it."""
        if self.more_body or self.disconnected:
            return None
        body, self.body = bytes(self.body), bytearray()
        return body

    def send_complete_response(self, head: bytes, parts: Sequence[bytes | memoryview]) -> bool:
        """Send a whole response of status 200: its headers as they go over the wire, content-length among them, and its
        body. False: that is not for now, as there is an access log, or what was sent before is not read yet."""
        if self.access_log or self.flow.write_paused:
            return False
        if not self.disconnected:
            self.response_started = self.response_complete = True
            end = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
            self._write((_begin(self.default_headers), head, end, *parts))
            self.message_event.set()
            self.on_response()
        return True

    def _write(self, pieces: Sequence[bytes | memoryview]) -> None:
        if self.keep_alive and sum(map(len, pieces)) < _JOINED:
            return self._outbox.write_soon(self.transport, b"".join(pieces))
        self._outbox.flush()
        self.transport.writelines(pieces)
        if not self.keep_alive:
            self.transport.close()
        return None


class Http10Cycle(UnchunkedCycle, Http11Cycle):
    """Those of HTTP/1.0."""


def cycle_of(receive: Receive) -> Http11Cycle | None:
    """Of the request that is received so, if it came this way."""
    cycle = getattr(receive, "__self__", None)
    return cycle if isinstance(cycle, Http11Cycle) else None


class _Beginning(NamedTuple):
    """What every whole response begins with, as long as these are the headers of all."""

    headers: object
    lines: bytes


_beginning = _Beginning(None, b"")


def _begin(headers: list[tuple[bytes, bytes]]) -> bytes:
    """uvicorn puts another list in the place of `headers` when the date changes."""
    global _beginning
    if headers is not _beginning.headers:
        lines = b"".join([b"%b: %b\r\n" % header for header in headers])
        _beginning = _Beginning(headers, b"HTTP/1.1 200 OK\r\n" + lines)
    return _beginning.lines


class _Target(NamedTuple):
    """What a request line points at, as ASGI has it."""

    path: str
    raw_path: bytes
    query: bytes


def _parsed(url: bytes) -> _Target:
    """Raises `HttpProtocolError` for control characters, escaped as they are: no path here has one, and to many a
    pattern a line break is an end."""
    parsed = parse_url(url)
    path = parsed.path.decode("ascii")
    if "%" in path:
        path = unquote(path)
        if _CONTROL.search(path):
            raise HttpProtocolError(HTTPStatus.BAD_REQUEST, "the path has a control character in it")
    return _Target(path, parsed.path, parsed.query or b"")


_known = lru_cache(_LONGEST_KNOWN)(_parsed)


def _scope(connection: HttpToolsProtocol, version: str) -> Any:
    url = connection.url
    target = _known(url) if len(url) < _LONGEST_KNOWN else _parsed(url)
    return {
        "type": "http",
        "asgi": {"version": connection.asgi_version, "spec_version": "2.3"},
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
    }
