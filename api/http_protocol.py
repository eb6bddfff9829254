"""HTTP/1.1 as uvicorn speaks it, without what it spends on every request alike.

A target is parsed once for all requests that have it, a body and an answer that are whole go in one call (`Cycle`),
the timer of an idle connection is left alone while it is not, and where the application says that it `begins_at_once`,
only a request that waits for something becomes a task. Knows nothing of applications beyond that.
"""

import asyncio
import contextvars
import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import unquote

import uvicorn
from httptools import parse_url
from starlette.types import Scope
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from .begun import Begun
from .chunks import FewChunks
from .old_http import UntilClosed
from .upgrades import NoUpgrades

CYCLE = "charonia.cycle"

_ACCESS = logging.getLogger("uvicorn.access")
_LONGEST_KNOWN = 256
"""Targets that are remembered: how many, and up to what length."""


_JOINED = 1 << 16
"""Bytes up to which it is cheaper to copy them than to write them apart."""


class _Target(NamedTuple):
    """What a request line points at, as ASGI has it."""

    path: str
    raw_path: bytes
    query: bytes


def _parsed(url: bytes) -> _Target:
    parsed = parse_url(url)
    path = parsed.path.decode("ascii")
    return _Target(unquote(path) if "%" in path else path, parsed.path, parsed.query or b"")


_known = lru_cache(_LONGEST_KNOWN)(_parsed)


class HttpProtocol(NoUpgrades, FewChunks):
    """One connection. `tells`: it has an access log, which is what the logger wants now; uvicorn itself asks when a
    connection begins."""

    tells = True
    _idle = False
    _idle_since = 0.0
    _next: "tuple[Cycle, Any] | None" = None

    def __init__(self, config: uvicorn.Config, *args: Any, **named: Any) -> None:
        super().__init__(config, *args, **named)
        self._direct: Any = config.app
        self._at_once: bool = getattr(self._direct, "begins_at_once", False)

    @property
    def access_log(self) -> bool:
        return self.tells and _ACCESS.isEnabledFor(logging.INFO)

    @access_log.setter
    def access_log(self, wanted: bool) -> None:
        pass

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._rest()

    def on_message_begin(self) -> None:
        self.url = b""
        self.expect_100_continue = False
        self.headers = []

    def on_headers_complete(self) -> None:
        if self.offers:
            return
        self._idle = False
        # Only the access log wants to know for whom a proxy asks.
        before, self.cycle = self.cycle, self._cycle()
        app = self.app if self.cycle.access_log else self._direct
        if before is not None and not before.response_complete:
            self.flow.pause_reading()
            self.pipeline.appendleft((self.cycle, app))
        elif self._at_once:
            self._next = (self.cycle, app)
        else:
            self._start_asgi_task(self.cycle, app)

    def _cycle(self) -> "Cycle":
        version = self.parser.get_http_version()
        return OldCycle(self, version) if version == "1.0" else Cycle(self, version)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        begins, self._next = self._next, None
        if begins is not None:
            self._begin(*begins)

    def _begin(self, cycle: "Cycle", app: Any) -> None:
        """All of the request that came together is there."""
        context = contextvars.copy_context()
        begun = context.run(Begun, cycle.run_asgi(app))
        if not begun.done:
            task = self.loop.create_task(_rest(begun), context=context)
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)

    # An idle connection is closed after a while, also in the midst of a request's head: it costs a file. Its timer may
    # ring too early and is not moved with every request.

    def _unset_keepalive_if_required(self) -> None:
        pass

    def _rest(self) -> None:
        self._idle, self._idle_since = True, self.loop.time()
        if self.timeout_keep_alive_task is None:
            self._ring_after(self.timeout_keep_alive)

    def on_response_complete(self) -> None:
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            return
        self.flow.resume_reading()
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            return
        self._rest()

    def timeout_keep_alive_handler(self) -> None:
        self.timeout_keep_alive_task = None
        if not self._idle:
            return
        left = self._idle_since + self.timeout_keep_alive - self.loop.time()
        if left > 0:
            self._ring_after(left)
        else:
            super().timeout_keep_alive_handler()

    def _ring_after(self, seconds: float) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None


async def _rest(begun: Begun[None]) -> None:
    await begun


class Cycle(RequestResponseCycle):
    """One request and its response. Who answers finds it in the scope's `extensions`, as `CYCLE`."""

    def __init__(self, connection: HttpProtocol, version: str) -> None:
        scope = _scope(connection, version)
        scope["extensions"][CYCLE] = self
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

    async def run_asgi(self, app: Any) -> None:
        try:
            await super().run_asgi(app)
        finally:  # the scope names the cycle, which holds the scope
            self.scope["extensions"].clear()

    def whole_body(self) -> bytes | None:
        """The body, if all of it is there; then nobody needs to receive it."""
        if self.more_body or self.disconnected:
            return None
        body, self.body = bytes(self.body), bytearray()
        return body

    def answer(self, head: bytes, parts: Sequence[bytes | memoryview]) -> bool:
        """Send a whole response of status 200: its headers as they go over the wire, content-length among them, and its
        body. False: that is not for now, as there is an access log, or what was sent before is not read yet."""
        if self.access_log or self.flow.write_paused:
            return False
        if not self.disconnected:
            self.response_started = self.response_complete = True
            end = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
            first = b"".join((_begin(self.default_headers), head, end))
            if sum(map(len, parts)) < _JOINED:
                self.transport.write(b"".join((first, *parts)))
            else:
                self.transport.writelines((first, *parts))
            self.message_event.set()
            if not self.keep_alive:
                self.transport.close()
            self.on_response()
        return True


class OldCycle(UntilClosed, Cycle):
    """Those of HTTP/1.0."""


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


def _scope(connection: HttpProtocol, version: str) -> Any:
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
        "extensions": {},
    }


def cycle_of(scope: Scope) -> Cycle | None:
    """Of a request that came this way."""
    extensions = scope.get("extensions")
    return None if extensions is None else extensions.get(CYCLE)
