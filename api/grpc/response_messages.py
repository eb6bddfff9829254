"""v2's inference messages: an InferResponse becomes a ModelInferResponse.

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
from ...core.tensor import Tensor
from .. import raw_tensors
from ..classification import classify
from ..requested_outputs import RequestedOutput, write_to_shared_memory

ProtoMessage: TypeAlias = Any
"""A protobuf message: the published modules are generated at import and have no types."""

_LONG = 1 << 14
"""Elements of an output."""

_FINAL = "triton_final_response"
_LARGEST = 2**31 - 1
"""Bytes that gRPC, and protobuf, can put into one message."""


def parse_version(version: str) -> str:
    """A version as the gateway wants it; empty means the latest.

    Raises:
        InvalidArgument: it is no number above zero.
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
    """What `write_response` makes; where that takes long, beside the event loop."""
    if any(tensor.data.size > _LONG for tensor in response.outputs):
        return await asyncio.to_thread(write_response, config, request_id, response, wanted)
    return write_response(config, request_id, response, wanted)


def write_response(
    config: ModelConfig, request_id: str, response: InferResponse, wanted: Mapping[str, RequestedOutput]
) -> ProtoMessage:
    """One response of a model; data always raw, or where it is `wanted`.

    Raises:
        CharoniaError: an output cannot be had as it is wanted.
    """
    message = pb.ModelInferResponse(model_name=config.name, model_version=config.version, id=request_id)
    outputs, contents = message.outputs, message.raw_output_contents
    for tensor in response.outputs:
        if tensor.name in wanted:
            tensor, data = _as_wanted(tensor, wanted[tensor.name], config)
        else:
            data = raw_tensors.encode(tensor)
        outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        contents.append(data)
    _check_size(sum(map(len, contents)))
    if response.parameters:
        for key, value in response.parameters.items():
            _set_parameter(message.parameters[key], value)
    return message


def _check_size(size: int) -> None:
    if size > _LARGEST:
        message = f"Response has byte size {size} which exceeds gRPC's byte size limit {_LARGEST}."
        raise InvalidArgument(message)


def _as_wanted(tensor: Tensor, wanted: RequestedOutput, config: ModelConfig) -> tuple[Tensor, bytes]:
    """What to say of it, and what to send."""
    if wanted.memory is not None:
        write_to_shared_memory(tensor, wanted.memory)
        return tensor, b""
    said = classify(config, tensor, wanted.classes) if wanted.classes else tensor
    return said, raw_tensors.encode(said)


def mark_final(message: ProtoMessage, final: bool) -> ProtoMessage:
    """Say of a stream's response whether it is its request's last one."""
    message.parameters[_FINAL].bool_param = final
    return message


def write_stream_error(asked: ProtoMessage, text: str) -> ProtoMessage:
    """The end of one request of a stream that failed."""
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
