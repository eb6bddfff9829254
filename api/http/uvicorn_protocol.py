"""One HTTP/1.1 connection by uvicorn and httptools; knows nothing of applications.

Every override of uvicorn's internals is here, in `request_cycle` and in `server`. For speed:

- targets that repeat are parsed once, and an idle connection has one timer, not one for each request;
- a request starts in the turn of the event loop that completes its head, and gets a task only when it waits;
- complete bodies and responses bypass ASGI's messages, and responses of one turn leave together.

For safety:

- heads, trailers and numbers of chunks are limited, and so are silence within a body and its pace;
- what is no request, or may be taken for two, is refused in JSON;
- a length in the head of a body in chunks does not count;
- offers to speak another protocol are declined, and HTTP/1.0 gets no chunks.
"""

from http import HTTPStatus
from typing import Any

from httptools import HttpParserError, HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from ...processes import gc_tuning
from .eager import start_eagerly
from .request_cycle import Http10Cycle, Http11Cycle, HttpServerState
from .request_head import (
    MAX_CHUNKS,
    MAX_HEAD_BYTES,
    MAX_HEADERS,
    HttpProtocolError,
    LingeringConnection,
    check_framing,
    head_size,
    head_too_large,
    head_without_upgrade,
    too_many_chunks,
)

_MAX_PIPELINED = 8
"""Requests behind one that is answered while the connection is read on: an end that is not read is not told."""


class HttpProtocol(HttpToolsProtocol):
    """One connection. `cycle` is its newest request, which may wait in the `pipeline` for those before it."""

    server_state: HttpServerState
    ends_with_response = False
    """Whether the response to a request that begins from now on is its last."""
    _ready: tuple[Http11Cycle, Any] | None = None
    _running: Http11Cycle | None = None
    """The request that was started last."""
    _idle = False
    _idle_since = 0.0
    _received = 0
    _in_head = False
    _head_bytes = 0
    _chunked_cycle: object = None
    _chunks = 0
    _trailing_bytes = 0
    _large_unread = False

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._allow_length_beside_chunks()
        self._await_request()

    # From bytes to requests

    def data_received(self, data: bytes) -> None:
        self.server_state.coalescer.flush_for(self.transport)  # what comes of this may be written at once
        self._received = len(data)
        cycle = self.cycle
        body_bytes = len(cycle.body) if cycle is not None and cycle.more_body else -1
        try:
            try:
                self.parser.feed_data(data)
            except HttpParserUpgrade as offer:
                self._feed_without_offers(memoryview(data), offer)
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

    def _feed_without_offers(self, rest: memoryview, offer: HttpParserUpgrade) -> None:
        """Give the parser a request that offers another protocol a second time, without the offer, and then the `rest`.

        JDK's HTTP client offers h2c with the first request of a connection. The parser takes the offer for accepted,
        and what follows for the other protocol.
        """
        while True:
            method, version = self.parser.get_method(), self.parser.get_http_version()
            if method == b"CONNECT":
                raise HttpParserError from None
            head, rest = head_without_upgrade(method, self.url, version, self.headers), rest[offer.args[0] :]
            self.parser = HttpRequestParser(self)
            self._allow_length_beside_chunks()
            self.parser.feed_data(head)
            try:
                return self.parser.feed_data(rest)
            except HttpParserUpgrade as another:
                offer = another

    def _allow_length_beside_chunks(self) -> None:
        """Read a body in chunks as such where its head has a length, too, as Python's requests sends it."""
        self.parser.set_dangerous_leniencies(lenient_chunked_length=True)

    def _drop_length(self, cycle: Any) -> None:
        """Drop the length of a body in chunks, and use the connection no further: a proxy may have gone by that length
        (https://www.rfc-editor.org/rfc/rfc9112#section-6.3)."""
        headers = cycle.scope["headers"]
        left = [header for header in headers if header[0] != b"content-length"]
        if len(left) < len(headers):
            headers[:] = left
            cycle.keep_alive = False

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
        version = self.parser.get_http_version()
        check_framing(version, self.headers)
        if self.parser.should_upgrade():
            return
        self._idle = False
        before = self.cycle
        self.cycle = cycle = (Http10Cycle if version == "1.0" else Http11Cycle)(self, self.server_state, version)
        self.headers = []  # trailers are no headers
        # Only the access log wants to know for whom a proxy asks.
        app: Any = self.app if cycle.access_log else self.config.app
        if before is not None and not before.response_complete:
            self.pipeline.appendleft((cycle, app))
            if len(self.pipeline) >= _MAX_PIPELINED:
                self.flow.pause_reading()
        else:
            self._ready = cycle, app  # for when all that came together is parsed

    def on_chunk_header(self) -> None:
        """httptools' callback: each chunk has one, the empty one at the end too."""
        if self._chunked_cycle is not self.cycle:
            self._chunked_cycle, self._chunks = self.cycle, 0
            self._drop_length(self.cycle)
        self._trailing_bytes = 0
        self._chunks += 1
        if self._chunks == MAX_CHUNKS + 2:
            self._answer_error(too_many_chunks())

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if self.ends_with_response and not self.pipeline:
            cycle.keep_alive = False
        self._running = cycle
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
        """Answer no further request of this connection, and tell why unless a response is on its way."""
        running = self._running
        began = running is not None and running.response_started and not running.response_complete
        self._end_requests()
        self.flow.resume_reading()
        if not began:
            self.transport.write(error.answer(STATUS_LINE[error.status]))
        if error.client_still_sends:
            self.transport.set_protocol(LingeringConnection(self, self.transport))
        else:
            self.transport.close()

    def _end_requests(self) -> None:
        """Forget the requests that wait. For the application that has one, the client has left."""
        self._ready = None
        self.pipeline.clear()
        for cycle in (self._running, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

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

    def pause_writing(self) -> None:
        super().pause_writing()
        self._large_unread = self.transport.get_write_buffer_size() > gc_tuning.LARGE_REQUEST_BYTES

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._large_unread:  # what a slow client has read of a response is free only now
            gc_tuning.release_memory_soon()

    def eof_received(self) -> None:
        self.server_state.coalescer.flush()

    def shutdown(self) -> None:
        self.server_state.coalescer.flush()
        super().shutdown()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_requests()
        super().connection_lost(exc)
        if self.timeout_keep_alive_task is not None:
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
