"""Keys over gRPC: metadata `authorization`, and the same answers for every call that is not health."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from charonia.api.grpc_options import GrpcOptions
from charonia.api.grpc_server import GrpcServer
from charonia.api.keys import Keyring, Tenant
from charonia.api.metadata import ServerInfo
from charonia.api.server import bind

RIGHT = (("authorization", "Bearer k-a"),)
TEXT = {"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"hi"]}}
ASKED = pb.ModelInferRequest(model_name="llm", inputs=[TEXT])


@pytest.fixture
async def stub(gateway: Any) -> AsyncIterator[Any]:
    keys = Keyring([("k-a", Tenant("alpha", 2.0))])
    with bind("127.0.0.1", 0, "--grpc-port") as sock:
        server = GrpcServer(gateway, ServerInfo("triton", "9.9"), GrpcOptions(grpc_address="127.0.0.1"), sock, keys)
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{sock.getsockname()[1]}") as channel:
            yield GRPCInferenceServiceStub(channel)
        await server.stop(force=True)


async def test_health_is_for_everybody(stub: Any) -> None:
    assert (await stub.ServerLive(pb.ServerLiveRequest())).live
    assert (await stub.ServerReady(pb.ServerReadyRequest())).ready
    assert (await stub.ModelReady(pb.ModelReadyRequest(name="llm"))).ready


@pytest.mark.parametrize("metadata", [(), (("authorization", "Bearer k-b"),), (("authorization", "k-a"),)])
async def test_nothing_else_is(stub: Any, gateway: Any, metadata: tuple[Any, ...]) -> None:
    calls = (
        stub.ServerMetadata(pb.ServerMetadataRequest(), metadata=metadata),
        stub.ModelMetadata(pb.ModelMetadataRequest(name="llm"), metadata=metadata),
        stub.ModelInfer(ASKED, metadata=metadata),
        stub.RepositoryIndex(pb.RepositoryIndexRequest(), metadata=metadata),
        stub.ModelStreamInfer(metadata=metadata).read(),  # of a call that ends while it writes, grpc.aio forgets why
    )
    for call in calls:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await asyncio.wait_for(call, 60)
        assert refused.value.code() is StatusCode.UNAUTHENTICATED
        assert "API key" in (refused.value.details() or "")
    assert not gateway.asked


async def test_the_tenant_reaches_the_gateway(stub: Any, gateway: Any) -> None:
    gateway.texts = ("one",)
    await stub.ModelInfer(ASKED, metadata=RIGHT)
    async for _ in stub.ModelStreamInfer(iter([ASKED]), metadata=RIGHT):
        pass
    assert [(request.tenant, request.weight) for request in gateway.asked] == [("alpha", 2.0)] * 2
