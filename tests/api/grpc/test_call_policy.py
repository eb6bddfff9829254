"""Who may call what over gRPC, what of his metadata models get, and how answers are compressed."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc import StatusCode
from tritonclient.grpc import service_pb2 as pb
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from charonia.api.api_keys import Keyring
from charonia.api.grpc.settings import Caller, GrpcCallPolicy, build_call_policy, peer_address
from charonia.api.header_rules import APIS
from charonia.core.errors import InvalidArgument
from charonia.core.request_context import Outcome

from ..grpc_serving import refused, serving

ASKED = pb.ModelInferRequest(model_name="llm")
PAID = (("triton-grpc-protocol-infer-key", "secret"),)
RESTRICTED = "This protocol is restricted, expecting header 'triton-grpc-protocol-infer-key'"


async def streamed(stub: Any, metadata: Any = ()) -> Any:
    async def requests() -> Any:
        yield ASKED

    return [answer async for answer in stub.ModelStreamInfer(requests(), metadata=metadata)]


async def test_a_restricted_protocol_wants_its_header(gateway: Any) -> None:
    gateway.texts = ("x",)
    async with serving(gateway, grpc_restricted_protocol=("inference,logging:infer-key=secret",)) as server:
        stub = server.stub
        for metadata in ((), (("triton-grpc-protocol-infer-key", "no"),), (("infer-key", "secret"),)):
            assert await refused(stub.ModelInfer(ASKED, metadata=metadata)) == (StatusCode.UNAVAILABLE, RESTRICTED)
            refusal = await refused(stub.ModelStreamInfer(metadata=metadata).read())
            assert refusal == (StatusCode.UNAVAILABLE, RESTRICTED)
            refusal = await refused(stub.LogSettings(pb.LogSettingsRequest(), metadata=metadata))
            assert refusal == (StatusCode.UNAVAILABLE, RESTRICTED)
        assert not gateway.asked
        assert {context.end.outcome for context in gateway.contexts} == {Outcome.REJECTED}
        await stub.ModelInfer(ASKED, metadata=PAID)
        assert len(await streamed(stub, PAID)) == 1
        assert (await stub.LogSettings(pb.LogSettingsRequest(), metadata=PAID)).settings
        assert (await stub.ServerLive(pb.ServerLiveRequest())).live


def test_every_rpc_belongs_to_a_protocol() -> None:
    groups = tuple(f"{name}:{name}=v" for name in APIS)
    rules = build_call_policy(groups, "", Keyring())
    methods = pb.DESCRIPTOR.services_by_name["GRPCInferenceService"].methods_by_name
    assert {*rules.required_headers} == {*methods}
    assert {toll.key for toll in rules.required_headers.values()} == {*APIS}


@pytest.mark.parametrize(
    ("restrictions", "pattern", "text"),
    [
        (("inference",), "", "--grpc-restricted-protocol must be <api>"),
        (("all:k=v",), "", "--grpc-restricted-protocol: unknown restricted protocol 'all'"),
        (("health:k=v", "health:k=w"), "", "protocol 'health' can not be specified in multiple config groups"),
        ((), "(", "--grpc-header-forward-pattern: '[(]' is no regular expression"),
    ],
)
def test_flags_that_mean_nothing(restrictions: tuple[str, ...], pattern: str, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        build_call_policy(restrictions, pattern, Keyring())


async def test_metadata_becomes_parameters(gateway: Any) -> None:
    gateway.texts = ("x",)
    headers = (("x-color", "red"), ("x-bin", b"\0"), ("other", "1"))
    asked = pb.ModelInferRequest(model_name="llm", parameters={"x-size": pb.InferParameter(int64_param=1)})
    async with serving(gateway, grpc_header_forward_pattern="^X-") as server:
        stub = server.stub
        await stub.ModelInfer(asked, metadata=headers)
        await streamed(stub, headers)
        assert [request.parameters for request in gateway.asked] == [
            {"x-color": "red", "x-size": 1},
            {"x-color": "red"},
        ]
    async with serving(gateway, grpc_header_forward_pattern="prio|triton_") as server:
        stub = server.stub
        for name in ("priority", "triton_x"):
            text = f"Header '{name}' is reserved for Triton usage and cannot be forwarded."
            assert await refused(stub.ModelInfer(ASKED, metadata=((name, "1"),))) == (StatusCode.INVALID_ARGUMENT, text)


def test_nothing_is_read_where_nothing_is_asked_for() -> None:
    assert GrpcCallPolicy().identify_caller("ModelInfer", [("key", "value")]) == Caller()


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.1:5123", "10.0.0.1"),
        ("ipv6:[::1]:5123", "::1"),
        ("ipv6:%5Bfe80::1%25eth0%5D:5123", "fe80::1%eth0"),
        ("unix:", "unix"),
    ],
)
def test_a_client_is_known_by_its_address(peer: str, address: str) -> None:
    assert peer_address(SimpleNamespace(peer=lambda: peer)) == address


@asynccontextmanager
async def counted(port: int) -> AsyncIterator[tuple[int, list[int]]]:
    """A port that leads to another one, and the sizes of what came back from there."""
    sizes: list[int] = []
    leading: list[asyncio.Task[None]] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, note: Any) -> None:
        while data := await reader.read(1 << 16):
            note(len(data))
            writer.write(data)
        writer.close()
        await writer.wait_closed()

    async def lead(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        back, there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(
            pump(reader, there, lambda _: None), pump(back, writer, sizes.append), return_exceptions=True
        )

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        leading.append(asyncio.create_task(lead(reader, writer)))

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as proxy:
        yield proxy.sockets[0].getsockname()[1], sizes
    await asyncio.gather(*leading)


@pytest.mark.parametrize(("level", "smaller"), [("none", False), ("low", True), ("medium", True), ("high", True)])
async def test_answers_are_compressed(gateway: Any, level: str, smaller: bool) -> None:
    gateway.texts = ("x" * 10_000,)
    async with (
        serving(gateway, grpc_infer_response_compression_level=level) as served,
        counted(served.server.port) as (port, sizes),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        answer = await GRPCInferenceServiceStub(channel).ModelInfer(ASKED)
    assert len(answer.raw_output_contents[0]) == 10_004
    assert (sum(sizes) < 5_000) is smaller
