"""A rank in a process that Ray started, on whatever machine. Imports no Ray."""

import fcntl
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from struct import Struct
from typing import NamedTuple

from ...processes.child_process import set_process_name
from ..config import EngineConfig
from .layout import RankLayout
from .rank_connections import ConnectToken, connect_to_listener

_GET_ADDRESS = 0x8915
"""Linux's SIOCGIFADDR."""
_INTERFACE = Struct("16s4x4s16x")  # ifreq: name, then a sockaddr_in without port


class RemoteRankArgs(NamedTuple):
    """The arguments of a rank on another machine: `environment` to set, `token` to connect with, and those of
    `RankArgs`. `host`: its machine's address among the others'."""

    config: EngineConfig
    layout: RankLayout
    token: ConnectToken
    host: str
    local_rank: int
    local_ranks: int
    environment: Mapping[str, str]


class RankActor:
    """The Ray actor that runs one rank."""

    def serve(self, args: RemoteRankArgs) -> None:
        """Be that rank until it is told to leave. The process, and its line with it, waits to be ended then: what torch
        would tidy up by itself takes seconds."""
        set_process_name("charonia-rank")
        for name, value in (dict(args.environment) | _host_variables(args.host)).items():
            os.environ.setdefault(name, value)
        self._line = connect_to_listener(args.token)
        try:
            _serve(args, self._line)
        except SystemExit:
            os._exit(1)


def _serve(args: RemoteRankArgs, line: Connection) -> None:
    from .rank import RankArgs, run_rank  # imports torch

    config, layout, ticket, host, local, neighbours, _ = args
    run_rank(config, RankArgs(ticket.rank, layout, line, None, host, local, neighbours))


def _host_variables(host: str) -> dict[str, str]:
    found = interface_of(host)
    return {"TORCH_CPP_LOG_LEVEL": "ERROR"} | ({"GLOO_SOCKET_IFNAME": found} if found else {})


def interface_of(address: str) -> str | None:
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
