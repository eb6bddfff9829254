"""The ports of a server, reserved before there is anything to serve. Knows their flags; not what will listen there."""

import socket
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

from .grpc_options import GrpcOptions
from .options import ServerOptions, true
from .server import bind


class Ports(NamedTuple):
    """Sockets that do not listen yet; there is none for metrics that nobody wants."""

    http: socket.socket
    grpc: socket.socket
    metrics: socket.socket | None


@contextmanager
def reserved(server: ServerOptions, grpc: GrpcOptions) -> Iterator[Ports]:
    """The ports these ask for, given back at the end of the block.

    Raises:
        Unavailable: one is taken, or its address is not ours; the message names the flag.
    """
    with (
        bind(server.http_address, server.http_port, "--http-port") as http,
        bind(grpc.grpc_address, grpc.grpc_port, "--grpc-port") as rpc,
        _metrics(server) as metrics,
    ):
        yield Ports(http, rpc, metrics)


def _metrics(server: ServerOptions) -> AbstractContextManager[socket.socket | None]:
    if not true(server.allow_metrics):
        return nullcontext()
    return bind(server.metrics_address or server.http_address, server.metrics_port, "--metrics-port")
