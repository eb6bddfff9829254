"""Bare handlers on ports of their own, with the settings of uvicorn and grpc.aio that Charonia uses."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import uvicorn

from ..server_process import LOOPBACK, ServerAddress, free_ports, run_process, until_open


def serve_bare(app: Any, methods: Mapping[str, Any]) -> None:
    """Serve an ASGI `app` and `methods` of GRPCInferenceService until the process is ended; `sys.argv` has the two
    ports, HTTP first."""
    import uvloop

    uvloop.run(_serve(app, methods, *map(int, sys.argv[1:3])))


async def _serve(app: Any, methods: Mapping[str, Any], http_port: int, grpc_port: int) -> None:
    import grpc

    server = grpc.aio.server()
    service = grpc.method_handlers_generic_handler("inference.GRPCInferenceService", dict(methods))
    server.add_generic_rpc_handlers([service])
    server.add_insecure_port(f"{LOOPBACK}:{grpc_port}")
    await server.start()
    config = uvicorn.Config(
        app, host=LOOPBACK, port=http_port, http="httptools", ws="none", lifespan="off", log_config=None,
        access_log=False, server_header=False,
    )  # fmt: skip
    await uvicorn.Server(config).serve()
    await server.stop(0)


async def read_body(receive: Any) -> bytes:
    """The body of an ASGI request."""
    message = await receive()
    pieces = [message.get("body", b"")]
    while message.get("more_body", False):
        message = await receive()
        pieces.append(message.get("body", b""))
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


@contextmanager
def bare_server(handlers: str) -> Iterator[ServerAddress]:
    """A process with the handlers of the module `handlers` of this folder."""
    http_port, grpc_port = free_ports(2)
    command = [sys.executable, "-m", f"{__package__}.{handlers}", str(http_port), str(grpc_port)]
    with run_process(command) as (pid, alive):
        place = ServerAddress(LOOPBACK, http_port, grpc_port, pid)
        until_open(place, alive)
        yield place
