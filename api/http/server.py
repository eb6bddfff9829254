"""An ASGI application on a socket, served by uvicorn until it is stopped. Knows nothing of endpoints and models."""

import asyncio
import inspect
import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from ...core.errors import ServerExiting, Unsupported
from ...core.tasks import wait_for_first
from ..size_limits import BODY_TIMEOUT
from ..tls import ChangedFiles, KeyPair
from .request_cycle import HttpServerState
from .uvicorn_protocol import HttpProtocol

_FLUSH_SECONDS = 2
"""Time for responses that are written to reach their clients at the very end."""

CERTIFICATE_LOOK_SECONDS = 2.0
"""Between two looks whether a certificate's files have changed."""

_OVERRIDDEN: dict[type, str] = {
    RequestResponseCycle: "run_asgi send receive scope transport flow access_log message_event on_response keep_alive "
    "waiting_for_100_continue body more_body disconnected response_started response_complete chunked_encoding "
    "expected_content_length",
    HttpToolsProtocol: "connection_made connection_lost data_received eof_received shutdown on_message_begin on_url "
    "on_header on_headers_complete on_body on_message_complete on_response_complete timeout_keep_alive_handler "
    "_start_asgi_task _unset_keepalive_if_required _should_upgrade config app loop logger access_logger parser server "
    "timeout_keep_alive timeout_keep_alive_task server_state tasks transport flow client scheme pipeline headers cycle",
    ServerState: "total_requests tasks default_headers connections",
    uvicorn.Server: "serve startup capture_signals server_state should_exit",
}
"""Methods of uvicorn's classes, and attributes that their constructors set, that are overridden or used here."""

_CYCLE_ARGUMENTS = (
    "scope transport flow logger access_logger access_log default_headers message_event expect_100_continue keep_alive "
    "on_response"
)


def check_uvicorn() -> None:
    """Raises `Unsupported`, with the names that are missing, if the installed uvicorn is not one that we can extend."""
    missing = []
    for kind, names in _OVERRIDDEN.items():
        there = {*dir(kind), *kind.__init__.__code__.co_names}  # type: ignore[misc]
        missing += [f"{kind.__name__}.{name}" for name in names.split() if name not in there]
    if list(inspect.signature(RequestResponseCycle).parameters) != _CYCLE_ARGUMENTS.split():
        missing.append("the constructor of RequestResponseCycle")
    if missing:
        text = f"uvicorn {uvicorn.__version__} cannot be used, it lacks or has changed: {', '.join(missing)}"
        raise Unsupported(f"{text} (install a version that charonia's requirements name)")


class UvicornServer(uvicorn.Server):
    """uvicorn's server, which tells when it listens, and leaves signals alone."""

    def __init__(self, config: uvicorn.Config, state: HttpServerState) -> None:
        super().__init__(config)
        self.server_state = state
        self.listening = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.listening.set()

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class HttpServer:
    """One application on one bound socket, until `stop`. Raises `Unsupported` as `check_uvicorn`.

    `access_log`: uvicorn writes a line for each request, while its logger wants it. `body_timeout`: seconds to wait for
    the next piece of a body, after which reading it raises `BodyTimeout`.
    """

    def __init__(
        self,
        app: Any,
        sock: socket.socket,
        access_log: bool,
        tls: KeyPair | None = None,
        body_timeout: float = BODY_TIMEOUT,
    ) -> None:
        check_uvicorn()
        config = uvicorn.Config(
            app,
            http=HttpProtocol,
            ws="none",
            lifespan="off",
            log_config=None,
            server_header=False,
            timeout_keep_alive=75,
            timeout_graceful_shutdown=_FLUSH_SECONDS,
            ssl_certfile=None if tls is None else tls.certificate,
            ssl_keyfile=None if tls is None else tls.key,
        )
        logging.getLogger("uvicorn.error").addFilter(_is_error)
        self._server = UvicornServer(config, HttpServerState(body_timeout, access_log))
        self._socket = sock
        self._serving: asyncio.Task[None] | None = None
        self._tls = tls
        self._watching: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when it listens."""
        self._serving = asyncio.create_task(self._server.serve([self._socket]))
        await wait_for_first(self._server.listening.wait(), self.ended())
        if self._tls is not None:
            self._watching = asyncio.create_task(self._watch_certificate(self._tls))

    async def _watch_certificate(self, files: KeyPair) -> None:
        context = self._server.config.ssl
        assert context is not None
        changed = ChangedFiles(files, lambda: files.reload_into(context))
        while True:
            await asyncio.sleep(CERTIFICATE_LOOK_SECONDS)
            changed.look()

    async def ended(self) -> None:
        """Return, or raise, when serving ends."""
        if self._serving is not None:
            await asyncio.shield(self._serving)

    def give_connections_away(self) -> None:
        """Have clients that are connected now connect again after their next response, which tells them to."""
        for connection in self._server.server_state.connections:
            if isinstance(connection, HttpProtocol):
                connection.ends_with_response = True

    async def stop(self, force: bool = False) -> None:
        """Close the socket and every connection; with `force`, what still runs is answered with that, or cancelled."""
        if self._serving is None:
            return
        if self._watching is not None:
            self._watching.cancel()
        if force:
            for task in self._server.server_state.tasks:
                task.cancel(ServerExiting())
        self._server.should_exit = True
        await self._serving


def _is_error(record: logging.LogRecord) -> bool:
    """A log filter: drops uvicorn's traceback for a request that was cancelled on purpose, at a forced stop, and its
    word for TLS clients that are slow to close connections without a request."""
    cancelled = record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError)
    idle = record.args == (0,) and "graceful shutdown exceeded" in record.msg
    return not (cancelled or idle)
