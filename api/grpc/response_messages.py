"""The answers to calls over gRPC: ModelInferResponses, and errors as statuses and as messages of a stream."""

import asyncio
import math

import grpc
from tritonclient.grpc import service_pb2 as pb

from ...core.errors import CharoniaError, ErrorCode, InvalidArgument
from ...core.model import ModelConfig
from ...core.request import InferResponse, ParameterValue
from .. import raw_tensors
from ..http.error_responses import printable
from ..infer_call import InferCall
from .settings import RpcContext
from .wire_format import ProtoMessage

SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."

_LONG = 1 << 14
"""Outputs of more elements are written in another thread."""

_FINAL = "triton_final_response"
_LARGEST = 2**31 - 1
"""Bytes that one message of gRPC, and of protobuf, can have."""

_MAX_DETAILS_BYTES = 2000
"""As much text as fits a client's default limit on metadata, even when each byte has to be percent-encoded."""

_UNLIKE = {"UNSUPPORTED": "UNIMPLEMENTED"}
_STATUS = {code: grpc.StatusCode[_UNLIKE.get(code.name, code.name)] for code in ErrorCode}


async def write_response_off_loop(
    config: ModelConfig, call: InferCall, response: InferResponse, final: bool | None = None
) -> ProtoMessage:
    """The message that `write_response` makes, in another thread where that takes long."""
    if any(tensor.data.size > _LONG for tensor in response.outputs):
        return await asyncio.to_thread(write_response, config, call, response, final)
    return write_response(config, call, response, final)


def write_response(
    config: ModelConfig, call: InferCall, response: InferResponse, final: bool | None = None
) -> ProtoMessage:
    """The message of one response; tensors are raw contents. `final`: whether it is the last of a stream. Raises
    `CharoniaError` if an output cannot be returned as `call` asks for it, or the message would be too large."""
    message = pb.ModelInferResponse(model_name=config.name, model_version=config.version, id=call.request.id)
    outputs, contents = message.outputs, message.raw_output_contents
    for output in response.outputs:
        wanted = call.outputs.get(output.name, call.default_output)
        tensor = wanted.apply(config, output)
        outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        contents.append(raw_tensors.encode(tensor) if wanted.memory is None else b"")
    size = sum(map(len, contents))
    if size > _LARGEST:
        raise InvalidArgument(f"Response has byte size {size} which exceeds gRPC's byte size limit {_LARGEST}.")
    if response.parameters:
        for key, value in response.parameters.items():
            setattr(message.parameters[key], _parameter_field(value), value)
    if final is not None:
        message.parameters[_FINAL].bool_param = final
    return message


def _parameter_field(value: ParameterValue) -> str:
    if isinstance(value, bool):
        return "bool_param"
    if isinstance(value, int):
        return "int64_param" if value < 2**63 else "uint64_param"
    return "double_param" if isinstance(value, float) else "string_param"


def write_stream_error(asked: ProtoMessage, error: CharoniaError) -> ProtoMessage:
    """The message that ends one request of a stream with an error."""
    name, version = asked.model_name, asked.model_version
    response = pb.ModelInferResponse(model_name=name, model_version=version, id=asked.id)
    response.parameters[_FINAL].bool_param = True
    return pb.ModelStreamInferResponse(error_message=_status_details(error), infer_response=response)


async def abort_call(context: RpcContext, error: CharoniaError) -> None:
    """End the call with the status of `error`; raises grpc's `AbortError`."""
    wait = (("retry-after", str(math.ceil(error.retry_after))),) if error.retry_after else ()
    await context.abort(_STATUS[error.code], _status_details(error), wait)


def _status_details(error: CharoniaError) -> str:
    """The message, shortened where it quotes too much of a request."""
    # Details that cannot be encoded would leave the client without any answer.
    text = printable(error.message)
    encoded = text.encode()
    return text if len(encoded) <= _MAX_DETAILS_BYTES else encoded[:_MAX_DETAILS_BYTES].decode(errors="ignore") + " ..."
