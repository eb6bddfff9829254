"""The ports of a server, reserved before there is anything to serve. Knows their flags; not what listens there."""

import errno
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import combinations
from typing import NamedTuple

from ..api.triton.clouds import CloudEndpoint
from ..core.errors import InvalidArgument, Unavailable
from .options import GrpcOptions, ServerOptions, is_true

_EVERYWHERE = {"0.0.0.0", "::"}
_PORTS_FAULT = (errno.EADDRINUSE, errno.EACCES)

SOCKETS_CLOSE_SECONDS = 3.0
"""For servers that are told to stop to close their sockets: longer than they give what is written to reach its clients.
What is not closed then ends with its process."""


class ReservedPorts(NamedTuple):
    """Sockets that do not listen yet; None for an endpoint that is not wanted."""

    http: socket.socket | None
    grpc: socket.socket | None
    metrics: socket.socket | None
    clouds: Sequence[socket.socket]


@contextmanager
def reserve_ports(
    server: ServerOptions, grpc: GrpcOptions, clouds: Sequence[CloudEndpoint] = (), several: bool = False
) -> Iterator[ReservedPorts]:
    """The ports that the options ask for, given back at the end of the block. `several`: processes of ours may listen
    on each.

    Raises `Unavailable` as `bind_port`, and `InvalidArgument` if two are the same, or none is for requests.
    """
    if not is_true(server.allow_http) and not is_true(grpc.allow_grpc) and not clouds:
        raise InvalidArgument("--allow-http and --allow-grpc are both false: nobody could ask anything")
    with ExitStack() as stack:
        ports: dict[str, socket.socket] = {}

        def reserve(flag: str, address: str, port: int, shared: bool = False) -> None:
            ports[flag] = stack.enter_context(bind_port(address, port, flag, shared))

        def reserve_shared(flag: str, address: str, port: int, reused: bool) -> None:
            if several and not reused:
                bind_port(address, port, flag).close()  # our own frontends alone may share it
            reserve(flag, address, port, reused or several)

        if is_true(server.allow_http):
            reserve_shared("--http-port", server.http_address, server.http_port, is_true(server.reuse_http_port))
        if is_true(grpc.allow_grpc):
            reserve_shared("--grpc-port", grpc.grpc_address, grpc.grpc_port, is_true(grpc.reuse_grpc_port))
        if is_true(server.allow_metrics):
            reserve("--metrics-port", server.metrics_address or server.http_address, server.metrics_port)
        for cloud in clouds:
            reserve_shared(cloud.flag, server.http_address, cloud.port, reused=False)
        for (flag, mine), (other, theirs) in combinations(ports.items(), 2):
            host, port = mine.getsockname()[:2]
            its_host, its_port = theirs.getsockname()[:2]
            # A port that nothing listens on yet can be reserved twice.
            if port == its_port and (host == its_host or {host, its_host} & _EVERYWHERE):
                raise InvalidArgument(f"{flag} and {other} are both {port}")
        http, rpc, metrics = (ports.get(flag) for flag in ("--http-port", "--grpc-port", "--metrics-port"))
        yield ReservedPorts(http, rpc, metrics, [ports[cloud.flag] for cloud in clouds])


def bind_port(address: str, port: int, flag: str, shared: bool = False) -> socket.socket:
    """The port, reserved but not listening: clients are turned away until there is something to serve.

    `shared`: other processes may listen on it too, if they say so as well. Raises `Unavailable` if the port is taken,
    or the address is not ours; the message names `flag`, or the one that goes with it.
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
