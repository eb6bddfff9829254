"""A ModelInferRequest becomes an `InferCall`, and responses become messages.

Whether a request fits the model is checked behind the gateway.
"""

import asyncio
import math
import re
from collections.abc import Iterable
from functools import lru_cache, partial
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2 as pb

from ...core.errors import CharoniaError, ErrorCode, InvalidArgument
from ...core.model import ModelConfig
from ...core.request import InferRequest, InferResponse, ParameterValue
from ...core.tensor import NUMPY_TYPES, Tensor
from ...processes.client_shared_memory import LentMemory, SharedMemoryRegistry, SharedMemorySlice
from .. import infer_call, raw_tensors
from ..http.error_responses import printable
from ..infer_call import DeferredInputs, InferCall, RequestedOutput, ResponseSize, release_memory_after
from ..raw_tensors import DeclaredInput, RawBytes
from ..size_limits import MAX_RESPONSE_BYTES
from .settings import Caller, RpcContext
from .wire_format import LazyInferRequest, ProtoMessage, delimiter, iter_contents

_EMPTY_FINAL = "triton_enable_empty_final_response"
_REGION = "shared_memory_region"
_CLASSES = "classification"
_KINDS: dict[str, tuple[str, ...]] = {
    "sequence_id": ("int64_param", "uint64_param", "string_param"),
    "sequence_start": ("bool_param",),
    "sequence_end": ("bool_param",),
    "priority": ("int64_param", "uint64_param"),
    "timeout": ("int64_param",),
    _EMPTY_FINAL: ("bool_param",),
}
"""By the name of a request parameter that the protocol defines: the fields of InferParameter that it may come in."""

_EXPECTED = {"sequence_id": ("int64_param", "string_param")}
"""Where Triton's error texts name fewer fields than it takes."""

_CONTENT_DATATYPES: dict[str, str] = {
    "bool_contents": "BOOL",
    "int_contents": "INT32",
    "int64_contents": "INT64",
    "uint_contents": "UINT32",
    "uint64_contents": "UINT64",
    "fp32_contents": "FP32",
    "fp64_contents": "FP64",
    "bytes_contents": "BYTES",
}
_NARROW = {"INT8": "INT32", "INT16": "INT32", "UINT8": "UINT32", "UINT16": "UINT32"}
"""Datatypes that come in the typed field of a wider one: their elements are the low bytes, as in Triton."""


def check_message(request: ProtoMessage | DecodeError) -> None:
    """Raises `InvalidArgument` for the error that stands in place of a request that could not be deserialized."""
    if isinstance(request, DecodeError):
        raise InvalidArgument(str(request))


def parse_version(version: str) -> str:
    """A request's version in the gateway's form; empty means the latest. Raises `InvalidArgument`."""
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


def read_parameter(parameter: ProtoMessage, kind: str, what: str, field: str) -> Any:
    """The value of a parameter; raises `InvalidArgument`, which says what it is, unless it is of this kind."""
    if parameter.WhichOneof("parameter_choice") != kind:
        raise InvalidArgument(f"invalid value type for {what}, expected {kind}.", field=field)
    return getattr(parameter, kind)


def parse_infer_message(message: ProtoMessage, regions: SharedMemoryRegistry, caller: Caller) -> InferCall:
    """Parse a ModelInferRequest; what `caller` has of forwarded metadata becomes parameters. Raises `CharoniaError` if
    a parameter, an input or an output cannot be what it claims to be."""
    parameters: dict[str, ParameterValue] = dict(caller.parameters)
    if message.parameters:
        parameters |= {key: _parameter(key, value) for key, value in message.parameters.items()}
        parameters.pop(_EMPTY_FINAL, None)
    outputs = _outputs(message, regions) if message.outputs else {}
    deferred: DeferredInputs = {}
    inputs = _inputs(message, regions, deferred)
    request = InferRequest(message.id, inputs, tuple(outputs) or None, parameters)
    return InferCall(request, outputs, deferred=deferred)


def wants_empty_final(message: ProtoMessage) -> bool:
    """Whether a stream of responses without a final one is to end with an empty response."""
    return _EMPTY_FINAL in message.parameters and bool(message.parameters[_EMPTY_FINAL].bool_param)


def _parameter(key: str, parameter: ProtoMessage) -> ParameterValue:
    if key.startswith("triton_") and key != _EMPTY_FINAL:
        raise InvalidArgument(
            "parameter keys starting with 'triton_' are reserved for Triton usage. "
            f"Only the following keys starting with 'triton_' are allowed: {_EMPTY_FINAL}",
            field=key,
        )
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None or kind not in _KINDS.get(key, (kind,)):
        expected = " or ".join(_EXPECTED.get(key) or _KINDS.get(key, ("int64_param, bool_param, or string_param",)))
        raise InvalidArgument(f"invalid value type for '{key}' parameter, expected {expected}.", field=key)
    value: ParameterValue = getattr(parameter, kind)
    if key == "priority" and int(value) < 0:
        raise InvalidArgument("invalid value for 'priority', expected value >= 0.", field=key)
    return value


def _outputs(message: ProtoMessage, regions: SharedMemoryRegistry) -> dict[str, RequestedOutput]:
    outputs: dict[str, RequestedOutput] = {}
    for output in message.outputs:
        name = output.name
        classes = 0
        memory = None
        if name in outputs:
            raise InvalidArgument(f"output '{name}' already exists in request", field=name)
        if _CLASSES in output.parameters:
            parameter = output.parameters[_CLASSES]
            if parameter.WhichOneof("parameter_choice") != "int64_param":
                text = f"invalid value type for '{_CLASSES}' parameter, expected int64_param"
                raise InvalidArgument(text, field=name)
            classes = parameter.int64_param
            if classes <= 0:
                raise InvalidArgument(f"invalid value for '{_CLASSES}' parameter, expected > 0", field=name)
        if _REGION in output.parameters:
            memory = _lent_memory(output, regions)
            if classes:
                raise InvalidArgument(f"Output can't set both '{_REGION}' and '{_CLASSES}'", field=name)
        outputs[name] = RequestedOutput(classes, memory)
    return outputs


def _lent_memory(tensor: ProtoMessage, regions: SharedMemoryRegistry) -> LentMemory:
    """The client's shared memory that an input is in, or an output belongs into."""

    def read(key: str, kind: str) -> Any:
        if key not in tensor.parameters:
            return 0
        what = f"'{key}' parameter for tensor '{tensor.name}'"
        return read_parameter(tensor.parameters[key], kind, what, tensor.name)

    region = read(_REGION, "string_param")
    offset = read("shared_memory_offset", "int64_param")
    return regions.view(SharedMemorySlice(region, offset, read("shared_memory_byte_size", "int64_param")))


def _inputs(message: ProtoMessage, regions: SharedMemoryRegistry, deferred: DeferredInputs) -> dict[str, Tensor]:
    """The tensors; those that take long to decode are left to `deferred`."""
    inputs: dict[str, Tensor] = {}
    request_id, model = message.id, message.model_name
    raw = message.raw_input_contents
    blobs = iter(raw)
    contents = message.contents if isinstance(message, LazyInferRequest) else {}
    for index, tensor in enumerate(message.inputs):
        name, refusal = tensor.name, ""
        if name in inputs:
            raise InvalidArgument(f"input '{name}' already exists in request", field=name)
        data: RawBytes | LentMemory | None = _lent_memory(tensor, regions) if _REGION in tensor.parameters else None
        typed = index in contents or tensor.HasField("contents")
        if typed and data is not None:
            refusal = f"unexpected 'content' provided when using shared memory for input tensor '{name}' for model"
        elif typed and raw:
            refusal = f"contents field must not be specified when using raw_input_contents for '{name}' for model"
        if refusal:
            raise InvalidArgument(f"{refusal} '{model}'", field=name)
        declared = DeclaredInput(request_id, model, name, tensor.datatype, tuple(tensor.shape))
        if index in contents:
            decode = partial(asyncio.to_thread, _decode_contents, declared, iter_contents(contents[index]))
            inputs[name] = infer_call.defer(declared, decode, deferred)
        elif typed:
            inputs[name] = _decode_contents(declared, (tensor.contents,))
        else:
            data = next(blobs, None) if data is None else data
            if data is None:
                text = f"unable to find data for input tensor '{name}' for model '{model}' in request."
                raise InvalidArgument(text, field=name)
            inputs[name] = infer_call.raw_input(declared, data, deferred)
    return inputs


def _decode_contents(declared: DeclaredInput, pieces: Iterable[ProtoMessage]) -> Tensor:
    """The tensor of an input whose typed contents come in these pieces, of which there is at least one."""
    datatype = declared.datatype
    count = raw_tensors.element_count(declared)
    done = 0
    dtype = np.dtype(NUMPY_TYPES.get(datatype, np.uint8))
    wide = NUMPY_TYPES[_NARROW[datatype]] if datatype in _NARROW else dtype
    strings, numbers = [], []
    try:
        for piece in pieces:
            values = _values(declared, piece)
            done += len(values)
            if datatype == "BYTES":
                raw_tensors.check_string_count(declared, count, max(count, done))
                strings += values
            else:
                numbers.append(np.array(values, wide).astype(dtype))
    except DecodeError as error:
        raise InvalidArgument(str(error), field=declared.name) from None
    if datatype == "BYTES":
        return declared.tensor(raw_tensors.string_array(declared, strings, count))
    raw_tensors.check_byte_size(declared, count * dtype.itemsize, done * dtype.itemsize)
    return declared.tensor(numbers[0] if len(numbers) == 1 else np.concatenate(numbers))


def _values(declared: DeclaredInput, contents: ProtoMessage) -> Any:
    """The values of the one typed field that is filled; raises `InvalidArgument` if it is another datatype's."""
    values: Any = ()
    for descriptor, held in contents.ListFields():
        datatype = _CONTENT_DATATYPES[descriptor.name]
        if datatype != _NARROW.get(declared.datatype, declared.datatype):
            text = f"unexpected explicit tensor data for input tensor '{declared.name}' for model '{declared.model}'"
            text += f" of type '{datatype}', expected datatype '{declared.datatype}'"
            raise InvalidArgument(text, field=declared.name)
        values = held
    return values


SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."

FINAL = "triton_final_response"
_RAW_OUTPUTS = pb.ModelInferResponse.RAW_OUTPUT_CONTENTS_FIELD_NUMBER
_LARGEST = 2**31 - 1
"""Bytes that one message of gRPC, and of protobuf, can have."""

_MAX_DETAILS_BYTES = 2000
"""As much text as fits a client's default limit on metadata, even when each byte has to be percent-encoded."""

_UNLIKE = {"UNSUPPORTED": "UNIMPLEMENTED"}
_STATUS = {code: grpc.StatusCode[_UNLIKE.get(code.name, code.name)] for code in ErrorCode}


async def write_response_off_loop(
    config: ModelConfig,
    call: InferCall,
    response: InferResponse,
    final: bool | None = None,
    limit: int = MAX_RESPONSE_BYTES,
) -> bytes:
    """What `write_response` makes, in another thread where that takes long."""
    release_memory_after(response)
    if call.writes_to_gpu or any(map(raw_tensors.is_long, response.outputs)):
        return await asyncio.to_thread(write_response, config, call, response, final, limit)
    return write_response(config, call, response, final, limit)


def write_response(
    config: ModelConfig,
    call: InferCall,
    response: InferResponse,
    final: bool | None = None,
    limit: int = MAX_RESPONSE_BYTES,
) -> bytes:
    """The encoded ModelInferResponse, its tensors as raw contents, which are copied once; `final`: whether it is the
    last of a stream.

    Raises `CharoniaError` for an output that cannot be returned as `call` asks, or too large a message
    (`ResponseSize`).
    """
    outline: list[tuple[str, str, tuple[int, ...]]] = []
    contents: list[bytes | memoryview] = []
    response_size = ResponseSize(limit)
    for output in response.outputs:
        wanted = call.outputs.get(output.name, call.default_output)
        tensor = wanted.apply(config, output)
        if wanted.memory is None:
            response_size.add(tensor, as_json=False)
        outline.append((tensor.name, tensor.datatype, tensor.shape))
        contents.append(raw_tensors.encode_cheaply(tensor) if wanted.memory is None else b"")
    size = sum(map(len, contents))
    if size > _LARGEST:
        raise InvalidArgument(f"Response has byte size {size} which exceeds gRPC's byte size limit {_LARGEST}.")
    parts: list[bytes | memoryview] = [_encode_outline(config.name, config.version, *outline)]
    if call.request.id or response.parameters or final is not None:
        message = pb.ModelInferResponse(id=call.request.id)
        for key, value in response.parameters.items():
            setattr(message.parameters[key], _parameter_field(value), value)
        if final is not None:
            message.parameters[FINAL].bool_param = final
        parts.append(message.SerializeToString())
    for content in contents:
        parts += delimiter(_RAW_OUTPUTS, len(content)), content
    return b"".join(parts)


@lru_cache(256)
def _encode_outline(name: str, version: str, *outputs: tuple[str, str, tuple[int, ...]]) -> bytes:
    """A response without what differs from one request to the next: encoded messages may follow each other."""
    message = pb.ModelInferResponse(model_name=name, model_version=version)
    for output, datatype, shape in outputs:
        message.outputs.add(name=output, datatype=datatype, shape=shape)
    encoded: bytes = message.SerializeToString()
    return encoded


def _parameter_field(value: ParameterValue) -> str:
    if isinstance(value, bool):
        return "bool_param"
    if isinstance(value, int):
        return "int64_param" if value < 2**63 else "uint64_param"
    return "double_param" if isinstance(value, float) else "string_param"


def write_stream_error(request: ProtoMessage, error: CharoniaError) -> ProtoMessage:
    """The message that ends one request of a stream with an error."""
    name, version = request.model_name, request.model_version
    response = pb.ModelInferResponse(model_name=name, model_version=version, id=request.id)
    response.parameters[FINAL].bool_param = True
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
