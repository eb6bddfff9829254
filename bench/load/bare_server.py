"""Bare handlers on ports of their own, with the settings of uvicorn and grpc.aio that Charonia uses."""

import sys
from collections.abc import Mapping
from typing import Any

import uvicorn

from ..server_process import LOOPBACK


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
