"""An ASGI application on a socket, served by uvicorn until it is stopped. Knows nothing of endpoints and models."""

import asyncio
import logging
import socket
from typing import Any

import uvicorn

from ...core.cancellation import wait_for_first
from ...core.errors import ServerExiting
from ..size_limits import BODY_TIMEOUT
from ..tls import KeyPair
from .uvicorn_protocol import HttpProtocol, HttpServerState, UvicornServer, check_uvicorn

_FLUSH_SECONDS = 2
"""Time for responses that are written to reach their clients at the very end."""


class HttpServer:
    """One application on one bound socket, until `stop`.

    `access_log`: uvicorn writes a line for each request while its logger wants it. `tls`: encrypt with this pair.
    `body_timeout`: seconds to wait for the next piece of a request's body, after which reading it raises `BodyTimeout`.

    Raises:
        Unsupported: the installed uvicorn is not one that this server can use.
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
        logging.getLogger("uvicorn.error").addFilter(_QUIET_CANCEL)
        self._server = UvicornServer(config, HttpServerState(body_timeout, access_log))
        self._socket = sock
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Return when it listens."""
        self._serving = asyncio.create_task(self._server.serve([self._socket]))
        await wait_for_first(self._server.listening.wait(), self.ended())

    async def ended(self) -> None:
        """Return, or raise, when serving ends."""
        if self._serving is not None:
            await asyncio.shield(self._serving)

    async def stop(self, force: bool = False) -> None:
        """Close the socket and every connection; with `force`, what still runs is answered with that, or cancelled."""
        if self._serving is None:
            return
        if force:
            for task in self._server.server_state.tasks:
                task.cancel(ServerExiting())
        self._server.should_exit = True
        await self._serving


class _QuietCancel(logging.Filter):
    """Drops uvicorn's traceback for a request that was cancelled on purpose, at a forced stop."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


_QUIET_CANCEL = _QuietCancel()
