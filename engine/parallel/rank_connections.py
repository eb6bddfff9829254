"""Lines between machines: TCP connections of whoever has a ticket. Knows nothing of what is said on them.

What is said is not encrypted: the ticket keeps strangers out who cannot read the network, no others.
"""

import hmac
import secrets
import select
import socket
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing.connection import Connection
from struct import Struct
from time import monotonic
from typing import NamedTuple

_GREETING = Struct("<32sI")  # secret, rank
_GREETING_SECONDS = 2.0
"""How long one who calls may take to say who he is; those after him wait."""

_PEER_TIMEOUT_SECONDS = 10
"""A machine that has not answered for so long is gone."""


class ConnectToken(NamedTuple):
    """What `rank` needs to call."""

    host: str
    port: int
    secret: bytes
    rank: int

    def __repr__(self) -> str:
        return f"Ticket({self.host}:{self.port}, rank {self.rank})"


class RankConnection(NamedTuple):
    rank: int
    connection: Connection


class RankListener:
    """Where ranks call, on `host` alone.

    Raises:
        OSError: this machine does not have that address.
    """

    def __init__(self, host: str) -> None:
        self._listener = listen_on(host)
        self._host, self._port = self._listener.getsockname()[:2]
        self._secret = secrets.token_bytes(32)

    def token(self, rank: int) -> ConnectToken:
        return ConnectToken(self._host, self._port, self._secret, rank)

    def accept(self, seconds: float) -> RankConnection | None:
        """The next rank that calls; None if none does within so many seconds. Others are hung up on."""
        deadline = monotonic() + seconds
        while (left := deadline - monotonic()) > 0:
            self._listener.settimeout(left)
            try:
                caller = self._listener.accept()[0]
            except TimeoutError:
                return None
            if (rank := self._greeted(caller)) is not None:
                return RankConnection(rank, _connection_over(caller))
            caller.close()
        return None

    def close(self) -> None:
        self._listener.close()

    def _greeted(self, caller: socket.socket) -> int | None:
        """Which rank it is."""
        caller.settimeout(_GREETING_SECONDS)
        try:
            greeting = caller.recv(_GREETING.size, socket.MSG_WAITALL)
        except OSError:
            return None
        if len(greeting) < _GREETING.size:
            return None
        secret, rank = _GREETING.unpack(greeting)
        return int(rank) if hmac.compare_digest(secret, self._secret) else None


def listen_on(host: str) -> socket.socket:
    """A socket that listens on `host` alone, at a port that is free.

    Raises:
        OSError: this machine does not have that address.
    """
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def connect_to_listener(ticket: ConnectToken) -> Connection:
    """A line to whoever gave the ticket.

    Raises:
        OSError: nobody answers there.
    """
    caller = socket.create_connection((ticket.host, ticket.port), timeout=_PEER_TIMEOUT_SECONDS)
    caller.sendall(_GREETING.pack(ticket.secret, ticket.rank))
    return _connection_over(caller)


def wait_until_closed(lines: Iterable[Connection], seconds: float) -> bool:
    """Whether all lines are broken by those who called, in so many seconds. Others may read them meanwhile."""
    deadline, broken = monotonic() + seconds, True
    for line in lines:
        poll = select.poll()
        poll.register(line.fileno(), getattr(select, "POLLRDHUP", select.POLLHUP))
        broken = bool(poll.poll(1000 * max(0.0, deadline - monotonic()))) and broken
    return broken


def shut_down(line: Connection) -> None:
    """Break a line under whoever reads it, here and there."""
    with suppress(OSError), socket.socket(fileno=socket.dup(line.fileno())) as ours:
        ours.shutdown(socket.SHUT_RDWR)


def _connection_over(connected: socket.socket) -> Connection:
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a plan waits for no other
    _enable_keepalive(connected)
    return Connection(connected.detach())


def _enable_keepalive(connected: socket.socket) -> None:
    """A machine without power breaks no connection by itself."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    options = {
        "TCP_KEEPIDLE": _PEER_TIMEOUT_SECONDS // 2,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": _PEER_TIMEOUT_SECONDS // 2,
    }
    for name, value in (options | {"TCP_USER_TIMEOUT": 1000 * _PEER_TIMEOUT_SECONDS}).items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
