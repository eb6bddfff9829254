"""The ports of a server, reserved before there is anything to serve. Knows their flags; not what listens there."""

import errno
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import combinations
from typing import NamedTuple

from ..api.triton.clouds import CloudEndpoint
from ..core.errors import InvalidArgument, Unavailable
from .grpc_options import GrpcOptions
from .server_options import ServerOptions, is_true

_EVERYWHERE = {"0.0.0.0", "::"}
_PORTS_FAULT = (errno.EADDRINUSE, errno.EACCES)


class ReservedPorts(NamedTuple):
    """Sockets that do not listen yet; None for an endpoint that is not wanted."""

    http: socket.socket | None
    grpc: socket.socket | None
    metrics: socket.socket | None
    clouds: Sequence[socket.socket] = ()


@contextmanager
def reserve_ports(
    server: ServerOptions, grpc: GrpcOptions, clouds: Sequence[CloudEndpoint] = ()
) -> Iterator[ReservedPorts]:
    """The ports that the options ask for, given back at the end of the block.

    Raises:
        Unavailable: one is taken, or its address is not ours; the message names the flag.
        InvalidArgument: two ports are the same, or no endpoint for requests is wanted.
    """
    if not is_true(server.allow_http) and not is_true(grpc.allow_grpc) and not clouds:
        raise InvalidArgument("--allow-http and --allow-grpc are both false: nobody could ask anything")
    with ExitStack() as stack, _http(server) as http, _grpc(grpc) as rpc, _metrics(server) as metrics:
        others = {
            each.flag: stack.enter_context(bind_port(server.http_address, each.port, each.flag)) for each in clouds
        }
        doors = {"--http-port": http, "--grpc-port": rpc, "--metrics-port": metrics, **others}
        _check_apart({flag: sock for flag, sock in doors.items() if sock is not None})
        yield ReservedPorts(http, rpc, metrics, tuple(others.values()))


def _check_apart(ports: Mapping[str, socket.socket]) -> None:
    """Raises `InvalidArgument` for equal ports: a port that nothing listens on yet can be reserved twice."""
    for (one, mine), (other, theirs) in combinations(ports.items(), 2):
        (host, port), (its_host, its_port) = mine.getsockname()[:2], theirs.getsockname()[:2]
        if port == its_port and (host == its_host or {host, its_host} & _EVERYWHERE):
            raise InvalidArgument(f"{one} and {other} are both {port}")


def _http(server: ServerOptions) -> AbstractContextManager[socket.socket | None]:
    if not is_true(server.allow_http):
        return nullcontext()
    return bind_port(server.http_address, server.http_port, "--http-port", is_true(server.reuse_http_port))


def _grpc(grpc: GrpcOptions) -> AbstractContextManager[socket.socket | None]:
    if not is_true(grpc.allow_grpc):
        return nullcontext()
    return bind_port(grpc.grpc_address, grpc.grpc_port, "--grpc-port", is_true(grpc.reuse_grpc_port))


def _metrics(server: ServerOptions) -> AbstractContextManager[socket.socket | None]:
    if not is_true(server.allow_metrics):
        return nullcontext()
    return bind_port(server.metrics_address or server.http_address, server.metrics_port, "--metrics-port")


def bind_port(address: str, port: int, flag: str, shared: bool = False) -> socket.socket:
    """The port, reserved but not listening: clients are turned away until there is something to serve.

    `shared`: other processes may listen on it too, if they say so as well.

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
