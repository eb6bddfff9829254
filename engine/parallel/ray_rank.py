"""A rank in a process that Ray started, on whatever machine. Imports no Ray."""

import fcntl
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from struct import Struct
from typing import NamedTuple

from ...processes.child_process import show_name
from ..config import EngineConfig
from .layout import Layout
from .rank_connections import Ticket, call

_GET_ADDRESS = 0x8915
"""Linux's SIOCGIFADDR."""
_INTERFACE = Struct("16s4x4s16x")  # ifreq: name, then a sockaddr_in without port


class Errand(NamedTuple):
    """What a rank is sent out with: the environment that matters to it, and what it becomes once it has called. `host`:
    its machine's address among the others'."""

    config: EngineConfig
    layout: Layout
    ticket: Ticket
    host: str
    local: int
    neighbours: int
    environment: Mapping[str, str]


class RankActor:
    """What Ray starts, and ends."""

    def serve(self, errand: Errand) -> None:
        """Be that rank until it is told to leave. The process, and its line with it, waits to be ended then: what torch
        would tidy up by itself takes seconds."""
        show_name("charonia-rank")
        for name, value in (dict(errand.environment) | _own(errand.host)).items():
            os.environ.setdefault(name, value)
        self._line = call(errand.ticket)
        try:
            _serve(errand, self._line)
        except SystemExit:
            os._exit(1)


def _serve(errand: Errand, line: Connection) -> None:
    from .rank import Post, serve  # imports torch

    config, layout, ticket, host, local, neighbours, _ = errand
    serve(config, Post(ticket.rank, layout, line, None, host, local, neighbours))


def _own(host: str) -> dict[str, str]:
    found = interface(host)
    return {"TORCH_CPP_LOG_LEVEL": "ERROR"} | ({"GLOO_SOCKET_IFNAME": found} if found else {})


def interface(address: str) -> str | None:
    """The network interface that has this IPv4 address, if the system tells: gloo would ask for the machine's name,
    which many resolve to loopback."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                asked = _INTERFACE.pack(name.encode(), b"")
                _, found = _INTERFACE.unpack(fcntl.ioctl(asking, _GET_ADDRESS, asked))
                if socket.inet_ntoa(found) == address:
                    return name
    return None
