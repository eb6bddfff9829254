"""Runs an application on a socket: bind early, serve, drain, stop.

Knows nothing of doors and models; who drains says so through an awaitable.
"""

import asyncio
import errno
import logging
import signal
import socket
from collections.abc import Awaitable
from typing import Any, Protocol

import uvicorn

from ...core.errors import ServerExiting, Unavailable
from ..size_limits import BODY_TIMEOUT
from ..tls import KeyPair
from .uvicorn_protocol import HttpProtocol, HttpServerState, UvicornServer, check_uvicorn

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PORTS_FAULT = (errno.EADDRINUSE, errno.EACCES)
_FLUSH_SECONDS = 2
"""How long responses that are written may take to reach their clients' sockets at the very end."""


def bind_port(address: str, port: int, flag: str, shared: bool = False) -> socket.socket:
    """The port, reserved but not listening: clients are turned away until there is something to serve. `shared`: other
    processes may listen on it too, if they say so as well.

    Raises:
        Unavailable: the port is taken, or the address is not ours; the message names `flag`, or the one that goes
            with it.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shared:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        sock.bind((address, port))
    except OSError as error:
        sock.close()
        wrong = flag if error.errno in _PORTS_FAULT else flag.replace("-port", "-address")
        raise Unavailable(f"cannot open port {port} on {address}: {error.strerror} ({wrong})") from None
    return sock


class ListeningServer(Protocol):
    """Something that listens."""

    async def start(self) -> None:
        """Return when it listens."""

    async def ended(self) -> None:
        """Return, or raise, when serving ends."""

    async def stop(self, force: bool = False) -> None:
        """Let nobody in any more; with `force`, cancel what still runs."""


class ServerGroup:
    """Several servers that start, end and stop together."""

    def __init__(self, *servers: ListeningServer) -> None:
        self._servers = servers

    async def start(self) -> None:
        for server in self._servers:
            await server.start()

    async def ended(self) -> None:
        await wait_for_first(*(server.ended() for server in self._servers))

    async def stop(self, force: bool = False) -> None:
        await asyncio.gather(*(server.stop(force) for server in self._servers))


class StopSignals:
    """SIGINT and SIGTERM as two events: the first asks to stop, the second insists. A third ends the process.

    The interpreter's handlers and not the event loop's, which may be stuck. From the second signal on, and after the
    block, there are none: then the system ends the process, whatever it does.
    """

    def __init__(self) -> None:
        self.stop_requested = asyncio.Event()
        self.force_requested = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._next = iter((self.stop_requested, self.force_requested))

    def __enter__(self) -> "StopSignals":
        for number in _SIGNALS:
            signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def _receive(self, *_: object) -> None:
        event = next(self._next)
        self._loop.call_soon_threadsafe(event.set)
        if event is self.force_requested:
            self.__exit__()


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


async def wait_for_first(*waits: Awaitable[Any], timeout: float | None = None) -> None:
    """Return when one of them is over, or after `timeout` seconds; the others are cancelled."""
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class _QuietCancel(logging.Filter):
    """Drops uvicorn's traceback for a request that was cancelled on purpose, at a forced stop."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not (record.exc_info and isinstance(record.exc_info[1], asyncio.CancelledError))


_QUIET_CANCEL = _QuietCancel()
