"""Lines between machines: who is let in, and what breaks them."""

import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection

import pytest

from charonia.engine.parallel.rank_connections import (
    ConnectToken,
    RankConnection,
    RankListener,
    connect_to_listener,
    shut_down,
    wait_until_closed,
)

SECONDS = 30.0


@pytest.fixture
def gate() -> Iterator[RankListener]:
    gate = RankListener("127.0.0.1")
    with gate.socket:
        yield gate


def connected(gate: RankListener, rank: int = 0) -> tuple[RankConnection, Connection]:
    """Both ends of a connection: each waits for the other's proof."""
    with ThreadPoolExecutor(1) as threads:
        theirs = threads.submit(connect_to_listener, gate.token(rank))
        found = gate.accept(SECONDS)
        assert found is not None
        return found, theirs.result(SECONDS)


def test_a_rank_is_known_by_its_ticket(gate: RankListener) -> None:
    (rank, ours), theirs = connected(gate, 3)
    with ours, theirs:
        theirs.send_bytes(b"here")
        ours.send_bytes(bytes(1 << 20))
        assert (rank, ours.recv_bytes(), len(theirs.recv_bytes())) == (3, b"here", 1 << 20)


def test_it_listens_on_one_address_alone(gate: RankListener) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", gate.token(0).port), timeout=SECONDS)


@pytest.mark.parametrize("greeting", [b"", b"GET / HTTP/1.1\r\n\r\n", bytes(36)])
def test_strangers_are_hung_up_on(gate: RankListener, greeting: bytes) -> None:
    ticket = gate.token(1)
    with socket.create_connection((ticket.host, ticket.port), timeout=SECONDS) as stranger:
        stranger.sendall(greeting)
        stranger.shutdown(socket.SHUT_WR)
        (rank, ours), theirs = connected(gate, 1)
        with ours, theirs:
            assert ticket.secret not in everything_from(stranger)
            theirs.send_bytes(b"here")
            assert (rank, ours.recv_bytes()) == (1, b"here")


def everything_from(stranger: socket.socket) -> bytes:
    """What a stranger was sent before the listener closed the connection."""
    received = b""
    with suppress(ConnectionResetError):
        while piece := stranger.recv(4096):
            received += piece
    return received


def test_a_stranger_that_says_nothing_is_not_waited_for(gate: RankListener) -> None:
    ticket = gate.token(1)
    with socket.create_connection((ticket.host, ticket.port), timeout=SECONDS):
        (rank, ours), theirs = connected(gate, 1)
        with ours, theirs:
            assert rank == 1


def test_another_secret_is_refused_by_both(gate: RankListener) -> None:
    with ThreadPoolExecutor(1) as threads:
        found = threads.submit(gate.accept, 5.0)
        with pytest.raises(AuthenticationError):
            connect_to_listener(gate.token(1)._replace(secret=b"guessed"))
        assert found.result(SECONDS) is None


def test_nobody_calls(gate: RankListener) -> None:
    assert gate.accept(0.01) is None


def test_a_ticket_does_not_print_its_secret(gate: RankListener) -> None:
    ticket = gate.token(0)
    assert str(ticket) == f"ConnectToken(127.0.0.1:{ticket.port}, rank 0)"


def test_a_line_does_not_wait_and_notices_silence(gate: RankListener) -> None:
    (_, ours), theirs = connected(gate)
    with ours, theirs:
        for line in (theirs, ours):
            with socket.socket(fileno=socket.dup(line.fileno())) as same:
                assert same.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
                assert same.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert same.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16) == bytes(16)
                assert same.gettimeout() is None


def test_whoever_reads_a_line_that_is_hung_up_stops(gate: RankListener) -> None:
    ends: list[type[BaseException]] = []
    (_, ours), theirs = connected(gate)
    with ours, theirs:

        def read() -> None:
            try:
                ours.recv_bytes()
            except (EOFError, OSError) as error:
                ends.append(type(error))

        reader = threading.Thread(target=read)
        reader.start()
        assert not wait_until_closed([ours], 0.0)
        shut_down(ours)
        reader.join(SECONDS)
        assert ends == [EOFError]
        assert wait_until_closed([theirs], SECONDS)


def test_a_machine_that_resets_its_line_has_broken_it(gate: RankListener) -> None:
    (_, ours), theirs = connected(gate)
    with ours:
        with socket.socket(fileno=socket.dup(theirs.fileno())) as same:
            same.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        theirs.close()
        assert wait_until_closed([ours], SECONDS)
        with pytest.raises((EOFError, ConnectionResetError)):
            ours.recv_bytes()


def test_a_gate_that_is_closed_is_not_called() -> None:
    gate = RankListener("127.0.0.1")
    ticket: ConnectToken = gate.token(0)
    gate.socket.close()
    with pytest.raises(ConnectionRefusedError):
        connect_to_listener(ticket)
