"""Keys over gRPC: metadata `authorization`, and the same answers for every call that is not health."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from grpc import StatusCode
from tritonclient.grpc import service_pb2 as pb

from charonia.api.api_keys import Keyring, Tenant

from ..grpc_serving import refused, serving

RIGHT = (("authorization", "Bearer k-a"),)
TEXT = {"name": "text_input", "datatype": "BYTES", "shape": [1], "contents": {"bytes_contents": [b"hi"]}}
ASKED = pb.ModelInferRequest(model_name="llm", inputs=[TEXT])


@pytest.fixture
async def stub(gateway: Any) -> AsyncIterator[Any]:
    async with serving(gateway, Keyring([("k-a", Tenant("alpha", 2.0))])) as server:
        yield server.stub


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
        code, text = await refused(call)
        assert code is StatusCode.UNAUTHENTICATED
        assert "API key" in text
    assert not gateway.asked


async def test_the_tenant_reaches_the_gateway(stub: Any, gateway: Any) -> None:
    gateway.texts = ("one",)
    await stub.ModelInfer(ASKED, metadata=RIGHT)
    async for _ in stub.ModelStreamInfer(iter([ASKED]), metadata=RIGHT):
        pass
    assert [(context.tenant, context.tenant_weight) for context in gateway.contexts[-2:]] == [("alpha", 2.0)] * 2
