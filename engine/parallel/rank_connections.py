"""TCP connections between the ranks of several machines and their core, without encryption.

Both ends prove by `multiprocessing.connection`'s HMAC challenge that they know a secret, which never travels on the
connection. Knows nothing of the messages.
"""

import secrets
import select
import socket
from collections.abc import Iterable
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from struct import Struct
from time import monotonic
from typing import NamedTuple

_TIMEVAL = Struct("ll")
_RANK_BYTES = 4
_HANDSHAKE_SECONDS = 2
"""How long a caller may be silent during the challenge; those after it wait."""

_PEER_TIMEOUT_SECONDS = 10
"""A machine that does not answer for so long is lost."""


class ConnectToken(NamedTuple):
    """The address and secret with which `rank` connects to a `RankListener`."""

    host: str
    port: int
    secret: bytes
    rank: int

    def __repr__(self) -> str:
        return f"ConnectToken({self.host}:{self.port}, rank {self.rank})"


class RankConnection(NamedTuple):
    rank: int
    connection: Connection


class RankListener:
    """Accepts the connections of ranks, on `host` alone, as long as `socket` is open.

    Raises:
        OSError: this machine does not have that address.
    """

    def __init__(self, host: str) -> None:
        self.socket = listen_on(host)
        self._host, self._port = self.socket.getsockname()[:2]
        self._secret = secrets.token_bytes(32)

    def token(self, rank: int) -> ConnectToken:
        return ConnectToken(self._host, self._port, self._secret, rank)

    def accept(self, seconds: float) -> RankConnection | None:
        """The next rank that connects, within so many seconds, or None. Callers without the secret are disconnected."""
        deadline = monotonic() + seconds
        while (left := deadline - monotonic()) > 0:
            self.socket.settimeout(left)
            try:
                connected = self.socket.accept()[0]
            except TimeoutError:
                return None
            _limit_silence(connected, _HANDSHAKE_SECONDS)
            connection = _connection_over(connected)
            try:
                deliver_challenge(connection, self._secret)
                answer_challenge(connection, self._secret)
                rank = int.from_bytes(connection.recv_bytes(_RANK_BYTES), "little")
            except (OSError, EOFError, AuthenticationError):
                connection.close()
                continue
            with socket.socket(fileno=socket.dup(connection.fileno())) as same:
                _limit_silence(same, 0)
            return RankConnection(rank, connection)
        return None


def listen_on(host: str) -> socket.socket:
    """A socket that listens on `host` alone, at a free port. Raises `OSError` if this machine lacks that address."""
    return socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def connect_to_listener(token: ConnectToken) -> Connection:
    """A connection to the listener that gave the token.

    Raises:
        OSError: nothing answers there.
        AuthenticationError: it is another listener.
    """
    address = (token.host, token.port)
    connection = _connection_over(socket.create_connection(address, timeout=_PEER_TIMEOUT_SECONDS))
    try:
        answer_challenge(connection, token.secret)
        deliver_challenge(connection, token.secret)
        connection.send_bytes(token.rank.to_bytes(_RANK_BYTES, "little"))
    except BaseException:
        connection.close()
        raise
    return connection


def _limit_silence(connected: socket.socket, seconds: int) -> None:
    """Let reads fail after so many seconds; 0: never."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _TIMEVAL.pack(seconds, 0))


def wait_until_closed(connections: Iterable[Connection], seconds: float) -> bool:
    """Whether the other ends close all connections within so many seconds. Other threads may read them meanwhile."""
    deadline = monotonic() + seconds
    closed = True
    for connection in connections:
        poll = select.poll()
        poll.register(connection.fileno(), getattr(select, "POLLRDHUP", select.POLLHUP))
        closed = bool(poll.poll(1000 * max(0.0, deadline - monotonic()))) and closed
    return closed


def shut_down(connection: Connection) -> None:
    """Close a connection for both ends, also under threads that read it."""
    with suppress(OSError), socket.socket(fileno=socket.dup(connection.fileno())) as ours:
        ours.shutdown(socket.SHUT_RDWR)


def _connection_over(connected: socket.socket) -> Connection:
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # a plan waits for no other
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # a machine without power breaks no connection
    options = {
        "TCP_KEEPIDLE": _PEER_TIMEOUT_SECONDS // 2,
        "TCP_KEEPINTVL": 1,
        "TCP_KEEPCNT": _PEER_TIMEOUT_SECONDS // 2,
        "TCP_USER_TIMEOUT": 1000 * _PEER_TIMEOUT_SECONDS,
    }
    for name, value in options.items():
        if hasattr(socket, name):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return Connection(connected.detach())
