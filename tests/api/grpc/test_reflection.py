"""What tools that have no file of the protocol ask the server."""

from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc import StatusCode
from grpc_reflection.v1alpha.reflection_pb2 import ServerReflectionRequest
from grpc_reflection.v1alpha.reflection_pb2_grpc import ServerReflectionStub

from charonia.cli import plan
from charonia.cli.options import GrpcOptions
from charonia.core.errors import Unavailable

from ..grpc_serving import refused, serving


async def test_the_messages_of_the_service(gateway: Any) -> None:
    asked = (
        ServerReflectionRequest(list_services=""),
        ServerReflectionRequest(file_containing_symbol="inference.GRPCInferenceService"),
        ServerReflectionRequest(file_containing_symbol="inference.Nothing"),
    )
    async with serving(gateway, grpc_reflection="true") as server:
        call = ServerReflectionStub(server.channel).ServerReflectionInfo(iter(asked))
        listed, described, unknown = [answer async for answer in call]
    names = [service.name for service in listed.list_services_response.service]
    assert sorted(names) == ["grpc.reflection.v1alpha.ServerReflection", "inference.GRPCInferenceService"]
    files = [FileDescriptorProto.FromString(data) for data in described.file_descriptor_response.file_descriptor_proto]
    methods = {method.name for file in files for service in file.service for method in service.method}
    assert "ModelStreamInfer" in methods
    assert unknown.error_response.error_code == StatusCode.NOT_FOUND.value[0]


async def test_not_without_its_flag(gateway: Any) -> None:
    async with serving(gateway) as server:
        call = ServerReflectionStub(server.channel).ServerReflectionInfo(iter([ServerReflectionRequest()]))
        assert (await refused(anext(aiter(call))))[0] is StatusCode.UNIMPLEMENTED


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "find_spec", {}.get)
    with pytest.raises(Unavailable, match="grpcio-reflection"):
        plan.parse_grpc_settings(GrpcOptions(grpc_reflection="true"))
