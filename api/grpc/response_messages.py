"""An `InferResponse` becomes a ModelInferResponse; versions and parameters as the protobuf messages have them.

Knows the published protobuf messages; nothing of calls, streams and gateways.
"""

import asyncio
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

from tritonclient.grpc import service_pb2 as pb

from ...core.errors import InvalidArgument
from ...core.model import ModelConfig
from ...core.request import InferResponse, ParameterValue
from .. import raw_tensors
from ..classification import classify
from ..requested_outputs import RequestedOutput, write_to_shared_memory

ProtoMessage: TypeAlias = Any
"""A protobuf message: the published modules are generated at import and have no types."""

_LONG = 1 << 14
"""Outputs of more elements are written in another thread."""

_FINAL = "triton_final_response"
_LARGEST = 2**31 - 1
"""Bytes that one message of gRPC, and of protobuf, can have."""


def parse_version(version: str) -> str:
    """A request's version in the gateway's form; empty means the latest.

    Raises:
        InvalidArgument: the version is no number above zero.
    """
    if not version:
        return ""
    number = re.match(r"\s*([+-]?\d{1,18})(?!\d)", version, re.ASCII)  # what std::stol takes, almost
    if number is None:
        raise InvalidArgument(
            f"failed to get model version from specified version string '{version}' (details: stol), "
            "version should be an integral value > 0"
        )
    if int(number[1]) <= 0:
        raise InvalidArgument(f"invalid model version specified '{version}' , version should be an integral value > 0")
    return str(int(number[1]))


async def write_response_off_loop(
    config: ModelConfig, request_id: str, response: InferResponse, wanted: Mapping[str, RequestedOutput]
) -> ProtoMessage:
    """What `write_response` returns, written in another thread where that takes long."""
    if any(tensor.data.size > _LONG for tensor in response.outputs):
        return await asyncio.to_thread(write_response, config, request_id, response, wanted)
    return write_response(config, request_id, response, wanted)


def write_response(
    config: ModelConfig, request_id: str, response: InferResponse, wanted: Mapping[str, RequestedOutput]
) -> ProtoMessage:
    """The message of one response. Tensors are raw contents, but for outputs in `wanted`, which tells their form.

    Raises:
        CharoniaError: an output cannot be returned as it is requested, or the message would be too large.
    """
    message = pb.ModelInferResponse(model_name=config.name, model_version=config.version, id=request_id)
    outputs, contents = message.outputs, message.raw_output_contents
    for tensor in response.outputs:
        requested = wanted.get(tensor.name)
        if requested is not None and requested.classes:
            tensor = classify(config, tensor, requested.classes)
        if requested is not None and requested.memory is not None:
            write_to_shared_memory(tensor, requested.memory)
            data = b""
        else:
            data = raw_tensors.encode(tensor)
        outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        contents.append(data)
    size = sum(map(len, contents))
    if size > _LARGEST:
        raise InvalidArgument(f"Response has byte size {size} which exceeds gRPC's byte size limit {_LARGEST}.")
    if response.parameters:
        for key, value in response.parameters.items():
            _set_parameter(message.parameters[key], value)
    return message


def mark_final(message: ProtoMessage, final: bool) -> ProtoMessage:
    """Set the parameter that tells whether a streamed response is its request's last one; returns the message."""
    message.parameters[_FINAL].bool_param = final
    return message


def write_stream_error(asked: ProtoMessage, text: str) -> ProtoMessage:
    """The message that ends one request of a stream with an error."""
    name, version = asked.model_name, asked.model_version
    response = pb.ModelInferResponse(model_name=name, model_version=version, id=asked.id)
    return pb.ModelStreamInferResponse(error_message=text, infer_response=mark_final(response, True))


def _set_parameter(parameter: ProtoMessage, value: ParameterValue) -> None:
    if isinstance(value, bool):
        parameter.bool_param = value
    elif isinstance(value, int) and value >= 2**63:
        parameter.uint64_param = value
    elif isinstance(value, int):
        parameter.int64_param = value
    elif isinstance(value, float):
        parameter.double_param = value
    else:
        parameter.string_param = value
