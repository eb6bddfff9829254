"""v2's inference messages: a ModelInferRequest becomes an InferRequest, an InferResponse a ModelInferResponse.

Knows the published protobuf messages; nothing of calls, streams and gateways.
"""

import re
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import DTypeLike, NDArray
from tritonclient.grpc import service_pb2 as pb

from ..core.errors import InvalidArgument, NotFound, Unsupported
from ..core.model import ModelConfig
from ..core.request import InferRequest, InferResponse, Scalar
from ..core.tensor import NUMPY_TYPES, Tensor
from . import raw

Message: TypeAlias = Any
"""A protobuf message: the published modules are generated at import and have no types."""

_EMPTY_FINAL = "triton_enable_empty_final_response"
_FINAL = "triton_final_response"
_KINDS = {
    "sequence_id": ("int64_param", "string_param"),
    "sequence_start": ("bool_param",),
    "sequence_end": ("bool_param",),
    "priority": ("int64_param", "uint64_param"),
    "timeout": ("int64_param",),
    _EMPTY_FINAL: ("bool_param",),
}
"""How the parameters that mean something to every server must be typed."""

_CONTENTS: dict[str, str] = {
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
"""Datatypes that travel in the field of a wider one: their elements are the low bytes, as in Triton."""


def read_version(version: str) -> str:
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


def read_request(message: Message) -> InferRequest:
    """Understand a request; whether it fits the model is the gateway's question.

    Raises:
        CharoniaError: a parameter, an input or an output cannot be what it claims to be.
    """
    parameters = _parameters(message.parameters)
    outputs = tuple(_output_name(output) for output in message.outputs)
    return InferRequest(message.id, _inputs(message), outputs or None, parameters)


def wants_empty_final(message: Message) -> bool:
    """A stream without a final response is to be ended by an empty one."""
    return _EMPTY_FINAL in message.parameters and bool(message.parameters[_EMPTY_FINAL].bool_param)


def write_response(config: ModelConfig, request_id: str, response: InferResponse) -> Message:
    """One response of a model; data always raw."""
    message = pb.ModelInferResponse(model_name=config.name, model_version=config.version, id=request_id)
    for tensor in response.outputs:
        message.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        message.raw_output_contents.append(raw.encode(tensor))
    for key, value in response.parameters.items():
        _set_parameter(message.parameters[key], value)
    return message


def mark_final(message: Message, final: bool) -> Message:
    """Say of a stream's response whether it is its request's last one."""
    message.parameters[_FINAL].bool_param = final
    return message


def write_fault(asked: Message, text: str) -> Message:
    """The end of one request of a stream that failed."""
    name, version = asked.model_name, asked.model_version
    response = pb.ModelInferResponse(model_name=name, model_version=version, id=asked.id)
    return pb.ModelStreamInferResponse(error_message=text, infer_response=mark_final(response, True))


def _parameters(given: Message) -> dict[str, Scalar]:
    parameters = {key: _parameter(key, value) for key, value in given.items()}
    parameters.pop(_EMPTY_FINAL, None)
    return parameters


def _parameter(key: str, parameter: Message) -> Scalar:
    if key.startswith("triton_") and key != _EMPTY_FINAL:
        raise InvalidArgument(
            "parameter keys starting with 'triton_' are reserved for Triton usage. "
            f"Only the following keys starting with 'triton_' are allowed: {_EMPTY_FINAL}",
            field=key,
        )
    kind = parameter.WhichOneof("parameter_choice")
    if kind is None or kind not in _KINDS.get(key, (kind,)):
        expected = " or ".join(_KINDS.get(key, ("int64_param, bool_param, or string_param",)))
        raise InvalidArgument(f"invalid value type for '{key}' parameter, expected {expected}.", field=key)
    value: Scalar = getattr(parameter, kind)
    if key == "priority" and int(value) < 0:
        raise InvalidArgument("invalid value for 'priority', expected value >= 0.", field=key)
    return value


def _output_name(output: Message) -> str:
    _refuse_shared_memory(output)
    if "classification" in output.parameters:
        raise Unsupported(f"classification of output '{output.name}' is not served yet", field=output.name)
    return str(output.name)


def _inputs(message: Message) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    blobs = iter(message.raw_input_contents)
    for given in message.inputs:
        if given.name in inputs:
            raise InvalidArgument(f"input '{given.name}' already exists in request", field=given.name)
        _refuse_shared_memory(given)
        inputs[given.name] = _input(given, message, next(blobs, None))
    return inputs


def _input(given: Message, message: Message, blob: bytes | None) -> Tensor:
    place, shape = raw.Place(message.id, message.model_name, given.name), tuple(given.shape)
    if given.HasField("contents"):
        if message.raw_input_contents:
            text = f"contents field must not be specified when using raw_input_contents for '{given.name}' for model"
            raise InvalidArgument(f"{text} '{message.model_name}'", field=given.name)
        return Tensor(given.name, given.datatype, shape, _contents(given, place))
    if blob is None:
        text = f"unable to find data for input tensor '{given.name}' for model '{message.model_name}' in request."
        raise InvalidArgument(text, field=given.name)
    return raw.decode(given.datatype, shape, blob, place)


def _contents(given: Message, place: raw.Place) -> NDArray[Any]:
    """The one typed field that is filled, as the input's datatype."""
    count = raw.element_count(tuple(given.shape), place)
    values: Any = ()
    for field, held in ((descriptor.name, value) for descriptor, value in given.contents.ListFields()):
        if _CONTENTS[field] != _NARROW.get(given.datatype, given.datatype):
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{given.name}' for model '{place.model}' "
                f"of type '{_CONTENTS[field]}', expected datatype '{given.datatype}'",
                field=given.name,
            )
        values = held
    if given.datatype == "BYTES":
        return raw.strings(list(values), count, place)
    return _numbers(values, given.datatype, count, place)


def _numbers(values: Any, datatype: str, count: int, place: raw.Place) -> NDArray[Any]:
    dtype: DTypeLike = NUMPY_TYPES.get(datatype, np.uint8)
    raw.check_byte_size(count * np.dtype(dtype).itemsize, len(values) * np.dtype(dtype).itemsize, place)
    return np.array(values, NUMPY_TYPES[_NARROW[datatype]] if datatype in _NARROW else dtype).astype(dtype)


def _refuse_shared_memory(tensor: Message) -> None:
    if "shared_memory_region" in tensor.parameters:
        region = tensor.parameters["shared_memory_region"].string_param
        raise NotFound(f"Unable to find shared memory region: '{region}'", field=tensor.name)


def _set_parameter(parameter: Message, value: Scalar) -> None:
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
