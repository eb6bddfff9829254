"""A lean HTTP/1.1 client for event streams: what arrives is stamped and kept, and understood later.

A load generator must not be what it measures: no headers are parsed beyond need, no event is decoded here.
"""

import asyncio
from time import perf_counter
from typing import NamedTuple, cast

_HEAD_END = b"\r\n\r\n"


class SseEvent(NamedTuple):
    """One server-sent event, without the empty line that ends it; `at` in seconds of `perf_counter`."""

    at: float
    data: bytes


class HttpResponseReader:
    """One answer, read from the pieces that arrive: `events` of an event stream, `body` of anything else."""

    def __init__(self) -> None:
        self.status = 0
        self.reusable = True
        self.complete = False
        self.events: list[SseEvent] = []
        self.body = b""
        self.size = 0
        self._buffer = b""
        self._rest = b""
        self._length: int | None = None
        self._is_stream = False

    def feed(self, data: bytes, now: float) -> None:
        """Take what arrived at `now`."""
        self._buffer += data
        if not self.status and not self._take_head():
            return
        if self._length is None:
            self._take_chunks(now)
        else:
            self._take_length(now)

    def _take_head(self) -> bool:
        head, separator, rest = self._buffer.partition(_HEAD_END)
        if not separator:
            return False
        status_line, *lines = head.split(b"\r\n")
        self.status, self._buffer = int(status_line.split(b" ", 2)[1]), rest
        headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(b":") for line in lines)}
        self._is_stream = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        self.reusable = headers.get(b"connection", b"").lower() != b"close"
        if b"chunked" not in headers.get(b"transfer-encoding", b"").lower():
            self._length = int(headers.get(b"content-length", b"0"))
        return True

    def _take_chunks(self, now: float) -> None:
        buffer, at = self._buffer, 0
        while (line := buffer.find(b"\r\n", at)) >= 0:
            size = int(buffer[at:line].partition(b";")[0], 16)
            end = line + 2 + size
            if len(buffer) < end + 2:
                break
            at = end + 2
            if not size:
                self.complete = True
                break
            self._take_body(buffer[line + 2 : end], now)
        self._buffer = buffer[at:]

    def _take_length(self, now: float) -> None:
        if len(self._buffer) >= (self._length or 0):
            self._take_body(self._buffer, now)
            self.complete = True

    def _take_body(self, data: bytes, now: float) -> None:
        self.size += len(data)
        if not self._is_stream:
            self.body += data
            return
        if b"\r" in data:
            data = data.replace(b"\r", b"")
        *whole, self._rest = (self._rest + data).split(b"\n\n")
        self.events += [SseEvent(now, event) for event in whole]


class HttpConnection(asyncio.Protocol):
    """One connection that stays open, one exchange at a time."""

    def __init__(self) -> None:
        self.closed = False
        self._transport: asyncio.Transport | None = None
        self._answer = HttpResponseReader()
        self._ended: asyncio.Future[None] | None = None

    async def exchange(self, request: bytes) -> HttpResponseReader:
        """Send a whole request, and return its whole answer.

        Raises:
            ConnectionError: the other side hung up before the end.
        """
        assert self._transport is not None
        self._answer = HttpResponseReader()
        self._ended = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        await self._ended
        return self._answer

    def close(self) -> None:
        self.closed = True
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's is none of asyncio's classes.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        try:
            self._answer.feed(data, perf_counter())
        except ValueError as error:
            self._finish(ConnectionError(f"not HTTP: {error}"))
        if self._answer.complete:
            self._finish(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self.closed = True
        self._finish(ConnectionError("the server hung up"))

    def _finish(self, error: Exception | None) -> None:
        if self._ended is None or self._ended.done():
            return
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)


class HttpClient:
    """POSTs to one server, over as many connections as there are exchanges at a time. `api_key`: shown unless empty."""

    def __init__(self, host: str, port: int, api_key: str = "") -> None:
        self._host, self._port = host, port
        self._key = f"Authorization: Bearer {api_key}\r\n" if api_key else ""
        self._idle: list[HttpConnection] = []

    async def post(
        self, path: str, body: bytes, headers: str = "Content-Type: application/json\r\n"
    ) -> HttpResponseReader:
        """`headers`: each with its line's end. Raises `OSError` when the server is not there, or hangs up."""
        head = f"POST {path} HTTP/1.1\r\nHost: {self._host}:{self._port}\r\n{headers}{self._key}"
        connection = await self._connection()
        try:
            answer = await connection.exchange(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        except BaseException:
            # Whatever of the answer is still to come belongs to nobody.
            connection.close()
            raise
        if answer.reusable:
            self._idle.append(connection)
        else:
            connection.close()
        return answer

    def close(self) -> None:
        for connection in self._idle:
            connection.close()

    async def _connection(self) -> HttpConnection:
        while self._idle:
            connection = self._idle.pop()
            if not connection.closed:
                return connection
        _, made = await asyncio.get_running_loop().create_connection(HttpConnection, self._host, self._port)
        return made
