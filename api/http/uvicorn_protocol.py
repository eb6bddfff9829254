"""HTTP/1.1 as uvicorn speaks it, without what it spends on every request alike.

A target is parsed once for all requests that have it, a body and an answer that are whole go in one call
(`Http11Cycle`),
answers leave together (`WriteCoalescer`), the timer of an idle connection is left alone while it is not, and where the
application says that it `begins_at_once`, only a request that waits for something becomes a task. Knows nothing of
applications beyond that.
"""

import contextvars
import logging
from typing import Any

import uvicorn
from uvicorn.server import ServerState

from ...cli.http_options import BODY_TIMEOUT
from .chunk_limits import ChunkLimitProtocol
from .eager import EagerAwaitable
from .protocol_errors import MAX_HEAD_BYTES, MAX_HEADERS, head_too_large
from .upgrades import UpgradeDecliningProtocol
from .uvicorn_cycle import Http10Cycle, Http11Cycle
from .write_coalescer import WriteCoalescer

_ACCESS = logging.getLogger("uvicorn.access")


class HttpServerState(ServerState):
    """What all connections of a server have in common. `body_timeout`: see `Http11Cycle`."""

    def __init__(self, body_timeout: float = BODY_TIMEOUT) -> None:
        super().__init__()
        self.outbox = WriteCoalescer()
        self.body_timeout = body_timeout


class HttpProtocol(UpgradeDecliningProtocol, ChunkLimitProtocol):
    """One connection. `tells`: it has an access log, which is what the logger wants now; uvicorn itself asks when a
    connection begins."""

    access_log_enabled = True
    _idle = False
    _idle_since = 0.0
    _next: tuple[Http11Cycle, Any] | None = None
    _in_head = False
    _head_bytes = 0
    _received = 0

    def __init__(self, config: uvicorn.Config, server_state: HttpServerState, *args: Any, **named: Any) -> None:
        super().__init__(config, server_state, *args, **named)
        self.outbox = server_state.outbox
        self._body_timeout = server_state.body_timeout
        self._direct: Any = config.app
        self._at_once: bool = getattr(self._direct, "begins_at_once", False)

    @property
    def access_log(self) -> bool:
        return self.access_log_enabled and _ACCESS.isEnabledFor(logging.INFO)

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
        self._in_head, self._head_bytes = True, -1

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._check_head()
        if self.offers_upgrade:
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

    def _check_head(self) -> None:
        if len(self.headers) > MAX_HEADERS:
            raise head_too_large()
        # A head that came with little else cannot be too long.
        if self._head_bytes >= 0 or self._received > MAX_HEAD_BYTES:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > MAX_HEAD_BYTES:
                raise head_too_large()

    def _cycle(self) -> Http11Cycle:
        version = self.parser.get_http_version()
        cycle = (Http10Cycle if version == "1.0" else Http11Cycle)(self, version, self.outbox, self._body_timeout)
        self.headers = []  # trailers are no headers
        return cycle

    def data_received(self, data: bytes) -> None:
        if self.transport in self.outbox:  # whatever comes of this may be written at once
            self.outbox.flush()
        self._received = len(data)
        cycle = self.cycle
        before = len(cycle.body) if cycle is not None and cycle.more_body else -1
        super().data_received(data)
        if self._in_head:
            self._count_head(len(data))
        elif before >= 0 and cycle.more_body and not cycle.response_complete and len(cycle.body) == before:
            self.count_trailing(len(data))
        begins, self._next = self._next, None
        if begins is not None:
            self._begin(*begins)

    def _count_head(self, size: int) -> None:
        """A head is not at its end yet; what came before it in the piece that it began in is not counted."""
        self._head_bytes = 0 if self._head_bytes < 0 else self._head_bytes + size
        if self._head_bytes > MAX_HEAD_BYTES:
            self._in_head = False
            self.answer_error(head_too_large())

    def _begin(self, cycle: Http11Cycle, app: Any) -> None:
        """All of the request that came together is there."""
        context = contextvars.copy_context()
        begun = context.run(EagerAwaitable, cycle.run_asgi(app))
        if not begun.done:
            task = self.loop.create_task(_rest(begun), context=context)
            task.add_done_callback(self.tasks.discard)
            self.tasks.add(task)

    def eof_received(self) -> None:
        self.outbox.flush()

    def shutdown(self) -> None:
        self.outbox.flush()
        super().shutdown()

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


async def _rest(begun: EagerAwaitable[None]) -> None:
    await begun
