"""The gRPC endpoint on a port of its own, and a client that is refused there."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import grpc
import pytest
from grpc import StatusCode
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from charonia.api.api_keys import Keyring
from charonia.api.grpc.control_rpcs import bound_rpcs
from charonia.api.grpc.server import GrpcServer
from charonia.api.grpc.settings import build_call_policy
from charonia.api.metadata import ServerInfo
from charonia.cli.options import GrpcOptions
from charonia.cli.plan import parse_grpc_settings
from charonia.cli.ports import bind_port

INFO = ServerInfo("triton", "9.9")


class Served(NamedTuple):
    """A server that listens, and a channel to it."""

    server: GrpcServer
    channel: grpc.aio.Channel

    @property
    def stub(self) -> Any:
        return GRPCInferenceServiceStub(self.channel)


@asynccontextmanager
async def serving(gateway: Any, keys: Keyring | None = None, **options: Any) -> AsyncIterator[Served]:
    """The endpoint of `gateway`, under `options` of the command line."""
    with bind_port("127.0.0.1", 0, "--grpc-port") as sock:
        chosen = GrpcOptions(grpc_address="127.0.0.1", **options)
        policy = build_call_policy(
            chosen.grpc_restricted_protocol, chosen.grpc_header_forward_pattern, keys or Keyring()
        )
        server = GrpcServer(gateway, INFO, parse_grpc_settings(chosen), sock, policy, bound_rpcs(gateway))
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            yield Served(server, channel)
        await server.stop(force=True)


async def refused(call: Any) -> tuple[StatusCode, str]:
    """With which status and words a call ends."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, 60)
    return caught.value.code(), caught.value.details() or ""
