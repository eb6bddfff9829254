"""A ModelInferRequest becomes an `InferRequest` and the way each of its outputs is returned.

Knows the published protobuf messages and Triton's error texts; nothing of calls and streams. Whether a request fits the
model is checked behind the gateway.
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import DTypeLike, NDArray

from ...core.errors import InvalidArgument
from ...core.request import InferRequest, ParameterValue
from ...core.tensor import NUMPY_TYPES, Tensor
from ...processes.client_shared_memory import SharedMemoryRegistry, SharedMemorySlice
from .. import deferred_tensors, raw_tensors
from ..deferred_tensors import DeferredInputs
from ..raw_tensors import InputRef, RawBytes
from ..requested_outputs import RequestedOutput
from .call_policy import Caller
from .response_messages import ProtoMessage
from .wire_format import LazyInferRequest, iter_contents

_EMPTY_FINAL = "triton_enable_empty_final_response"
_REGION = "shared_memory_region"
_CLASSES = "classification"
_KINDS = {
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


class GrpcInferCall(NamedTuple):
    """A parsed request. `requested`: by the names of outputs that it names, how to return them. `deferred`: by name,
    what decodes the long inputs, which are empty in `request` until then."""

    request: InferRequest
    requested: Mapping[str, RequestedOutput]
    deferred: DeferredInputs = {}


def parse_infer_message(message: ProtoMessage, regions: SharedMemoryRegistry, caller: Caller) -> GrpcInferCall:
    """Parse a ModelInferRequest; what `caller` has of forwarded metadata becomes parameters.

    Raises:
        CharoniaError: a parameter, an input or an output cannot be what it claims to be.
    """
    parameters: dict[str, ParameterValue] = dict(caller.parameters)
    if message.parameters:
        parameters |= {key: _parameter(key, value) for key, value in message.parameters.items()}
        parameters.pop(_EMPTY_FINAL, None)
    requested = _requested_outputs(message, regions) if message.outputs else {}
    deferred: DeferredInputs = {}
    inputs = _inputs(message, regions, deferred)
    request = InferRequest(message.id, inputs, tuple(requested) or None, parameters)
    return GrpcInferCall(request, requested, deferred)


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


def _requested_outputs(message: ProtoMessage, regions: SharedMemoryRegistry) -> dict[str, RequestedOutput]:
    requested: dict[str, RequestedOutput] = {}
    for output in message.outputs:
        if output.name in requested:
            text = f"Duplicate output name '{output.name}' is not allowed in a request"
            raise InvalidArgument(text, field=output.name)
        one = RequestedOutput(output.name)
        if output.parameters:
            one = RequestedOutput(output.name, _classes(output), _lent_memory(output, regions))
            one.validate()
        requested[output.name] = one
    return requested


def _classes(output: ProtoMessage) -> int:
    if _CLASSES not in output.parameters:
        return 0
    parameter = output.parameters[_CLASSES]
    if parameter.WhichOneof("parameter_choice") != "int64_param":
        raise InvalidArgument(f"invalid value type for '{_CLASSES}' parameter, expected int64_param", field=output.name)
    if parameter.int64_param <= 0:
        raise InvalidArgument(f"invalid value for '{_CLASSES}' parameter, expected > 0", field=output.name)
    return int(parameter.int64_param)


def _lent_memory(tensor: ProtoMessage, regions: SharedMemoryRegistry) -> memoryview | None:
    """The client's shared memory that an input is in, or an output belongs into; None where it names none."""
    if _REGION not in tensor.parameters:
        return None

    def read(key: str, kind: str) -> Any:
        if key not in tensor.parameters:
            return 0
        parameter = tensor.parameters[key]
        if parameter.WhichOneof("parameter_choice") != kind:
            text = f"invalid value type for '{key}' parameter for tensor '{tensor.name}', expected {kind}."
            raise InvalidArgument(text, field=tensor.name)
        return getattr(parameter, kind)

    region, offset = read(_REGION, "string_param"), read("shared_memory_offset", "int64_param")
    return regions.view(SharedMemorySlice(region, offset, read("shared_memory_byte_size", "int64_param")))


def _inputs(message: ProtoMessage, regions: SharedMemoryRegistry, deferred: DeferredInputs) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    blobs = iter(message.raw_input_contents)
    contents = message.contents if isinstance(message, LazyInferRequest) else {}
    for index, given in enumerate(message.inputs):
        name = given.name
        if name in inputs:
            raise InvalidArgument(f"input '{name}' already exists in request", field=name)
        data: RawBytes | None = _lent_memory(given, regions) if given.parameters else None
        typed = index in contents or given.HasField("contents")
        if typed and data is not None:
            text = f"unexpected 'content' provided when using shared memory for input tensor '{name}' for model"
            raise InvalidArgument(f"{text} '{message.model_name}'", field=name)
        if typed and message.raw_input_contents:
            text = f"contents field must not be specified when using raw_input_contents for '{name}' for model"
            raise InvalidArgument(f"{text} '{message.model_name}'", field=name)
        if not typed and data is None:
            data = next(blobs, None)
            if data is None:
                text = f"unable to find data for input tensor '{name}' for model '{message.model_name}' in request."
                raise InvalidArgument(text, field=name)
        ref = InputRef(message.id, message.model_name, name)
        inputs[name] = _input(given, ref, contents.get(index), data, deferred)
    return inputs


def _input(
    given: ProtoMessage,
    ref: InputRef,
    contents: memoryview | None,
    data: RawBytes | None,
    deferred: DeferredInputs,
) -> Tensor:
    """The tensor of an input: of raw `data`, else of long typed `contents`, else of those in the message itself.

    What takes long is left to `deferred`.
    """
    shape, datatype = tuple(given.shape), given.datatype
    if contents is not None:
        deferred[given.name] = partial(asyncio.to_thread, _decode_contents, given, contents, ref)
        return deferred_tensors.placeholder_tensor(datatype, shape, ref)
    if data is None:
        count = raw_tensors.element_count(datatype, shape, ref)
        values = _values(given, given.contents, ref)
        if datatype == "BYTES":
            return Tensor(given.name, datatype, shape, raw_tensors.string_array(list(values), count, ref))
        return Tensor(given.name, datatype, shape, _numbers(values, datatype, count, ref))
    if datatype == "BYTES" and len(data) > deferred_tensors.LONG_STRING_BYTES:
        tensor = deferred_tensors.placeholder_tensor(datatype, shape, ref)
        deferred[given.name] = deferred_tensors.deferred_strings(tensor, data, ref)
        return tensor
    return raw_tensors.decode(datatype, shape, data, ref)


def _decode_contents(given: ProtoMessage, contents: memoryview, ref: InputRef) -> Tensor:
    """The tensor of an input whose typed contents are still encoded, decoded a piece at a time."""
    shape, datatype, done = tuple(given.shape), given.datatype, 0
    count = raw_tensors.element_count(datatype, shape, ref)
    strings, numbers = [], [_numbers((), datatype, 0, ref)]
    try:
        for piece in iter_contents(contents):
            values = _values(given, piece, ref)
            done += len(values)
            if datatype == "BYTES":
                raw_tensors.check_string_count(count, max(count, done), ref)
                strings += values
            else:
                numbers.append(_numbers(values, datatype, len(values), ref))
    except DecodeError as error:
        raise InvalidArgument(str(error), field=given.name) from None
    if datatype == "BYTES":
        return Tensor(given.name, datatype, shape, raw_tensors.string_array(strings, count, ref))
    size = np.dtype(NUMPY_TYPES.get(datatype, np.uint8)).itemsize
    raw_tensors.check_byte_size(count * size, done * size, ref)
    return Tensor(given.name, datatype, shape, np.concatenate(numbers))


def _values(given: ProtoMessage, contents: ProtoMessage, ref: InputRef) -> Any:
    """The values of the one typed field that is filled; raises `InvalidArgument` if it is another datatype's."""
    values: Any = ()
    for descriptor, held in contents.ListFields():
        datatype = _CONTENT_DATATYPES[descriptor.name]
        if datatype != _NARROW.get(given.datatype, given.datatype):
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{given.name}' for model '{ref.model}' "
                f"of type '{datatype}', expected datatype '{given.datatype}'",
                field=given.name,
            )
        values = held
    return values


def _numbers(values: Any, datatype: str, count: int, ref: InputRef) -> NDArray[Any]:
    dtype: DTypeLike = NUMPY_TYPES.get(datatype, np.uint8)
    raw_tensors.check_byte_size(count * np.dtype(dtype).itemsize, len(values) * np.dtype(dtype).itemsize, ref)
    return np.array(values, NUMPY_TYPES[_NARROW[datatype]] if datatype in _NARROW else dtype).astype(dtype)
