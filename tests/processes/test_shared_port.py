"""Who gets the connections of a port that several sockets listen on."""

import select
import socket
import sys
from collections import Counter
from contextlib import ExitStack

import pytest

from charonia.processes.shared_port import spare_first_listener

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be told")


def listener(stack: ExitStack, port: int = 0) -> socket.socket:
    sock = stack.enter_context(socket.socket())
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    sock.bind(("127.0.0.1", port))
    sock.listen(64)
    return sock


def takers(listeners: list[socket.socket], count: int = 64) -> Counter[int]:
    """How many of `count` connections each listener gets."""
    taken: Counter[int] = Counter()
    for _ in range(count):
        with socket.create_connection(listeners[0].getsockname(), timeout=10):
            [ready], _, _ = select.select(listeners, [], [], 10)
            ready.accept()[0].close()
            taken[listeners.index(ready)] += 1
    return taken


def test_the_first_gets_no_more_while_all_the_others_are_there() -> None:
    with ExitStack() as stack:
        first = listener(stack)
        port = first.getsockname()[1]
        others = [listener(stack, port) for _ in range(2)]
        with socket.create_connection(first.getsockname()), socket.create_connection(first.getsockname()):
            queued = [sock for sock in (first, *others) if select.select([sock], [], [], 0)[0]]
            assert spare_first_listener(first, 2)
            for sock in queued:  # what was in a queue stays there
                sock.setblocking(False)
                while select.select([sock], [], [], 0)[0]:
                    sock.accept()[0].close()
        assert takers([first, *others]).keys() == {1, 2}
        others.pop(0).close()
        assert takers([first, *others]).total() == 64  # while one is missing, the first helps out
        others.append(listener(stack, port))
        assert takers([first, *others]).keys() == {1, 2}


def test_a_socket_that_shares_no_port_is_left_alone() -> None:
    with socket.socket() as sock:
        assert not spare_first_listener(sock, 2)
