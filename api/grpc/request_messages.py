"""A ModelInferRequest becomes what the gateway is asked, and where its outputs are wanted.

Knows the published protobuf messages and v2's error texts; nothing of calls and streams. Whether a request fits the
model is the gateway's question.
"""

import asyncio
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from numpy.typing import DTypeLike, NDArray

from ...core.client_shared_memory import SharedMemoryRegistry, SharedMemorySlice
from ...core.errors import InvalidArgument
from ...core.request import InferRequest, ParameterValue
from ...core.tensor import NUMPY_TYPES, Tensor
from .. import deferred_tensors, raw_tensors
from ..deferred_tensors import DeferredInputs
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


class GrpcInferCall(NamedTuple):
    """What is asked, and of the outputs that the request names how they are wanted. `later`: inputs that are empty in
    the request until somebody decodes them."""

    request: InferRequest
    requested: Mapping[str, RequestedOutput]
    deferred: DeferredInputs = {}


def parse_infer_message(message: ProtoMessage, regions: SharedMemoryRegistry, caller: Caller) -> GrpcInferCall:
    """Understand a request.

    Raises:
        CharoniaError: a parameter, an input or an output cannot be what it claims to be.
    """
    parameters = _parameters(message.parameters) if message.parameters else {}
    if caller.parameters:
        parameters = {**caller.parameters, **parameters}
    wanted = _all_wanted(message, regions) if message.outputs else {}
    tenant, weight = caller.tenant
    later: DeferredInputs = {}
    inputs = _inputs(message, regions, later)
    return GrpcInferCall(
        InferRequest(message.id, inputs, tuple(wanted) or None, parameters, tenant, weight), wanted, later
    )


def wants_empty_final(message: ProtoMessage) -> bool:
    """A stream without a final response is to be ended by an empty one."""
    return _EMPTY_FINAL in message.parameters and bool(message.parameters[_EMPTY_FINAL].bool_param)


def _parameters(given: ProtoMessage) -> dict[str, ParameterValue]:
    parameters = {key: _parameter(key, value) for key, value in given.items()}
    parameters.pop(_EMPTY_FINAL, None)
    return parameters


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


_EXPECTED = {"sequence_id": ("int64_param", "string_param")}
"""Where Triton's texts name fewer kinds than it takes."""


# Outputs


def _all_wanted(message: ProtoMessage, regions: SharedMemoryRegistry) -> dict[str, RequestedOutput]:
    wanted: dict[str, RequestedOutput] = {}
    for output in message.outputs:
        if output.name in wanted:
            raise InvalidArgument(
                f"Duplicate output name '{output.name}' is not allowed in a request", field=output.name
            )
        wanted[output.name] = _wanted(output, regions)
    return wanted


def _wanted(output: ProtoMessage, regions: SharedMemoryRegistry) -> RequestedOutput:
    if not output.parameters:
        return RequestedOutput(output.name)
    wanted = RequestedOutput(output.name, _classes(output), _memory(output, regions))
    wanted.validate()
    return wanted


def _classes(output: ProtoMessage) -> int:
    if _CLASSES not in output.parameters:
        return 0
    parameter = output.parameters[_CLASSES]
    if parameter.WhichOneof("parameter_choice") != "int64_param":
        raise InvalidArgument(f"invalid value type for '{_CLASSES}' parameter, expected int64_param", field=output.name)
    if parameter.int64_param <= 0:
        raise InvalidArgument(f"invalid value for '{_CLASSES}' parameter, expected > 0", field=output.name)
    return int(parameter.int64_param)


def _memory(tensor: ProtoMessage, regions: SharedMemoryRegistry) -> memoryview | None:
    """The shared memory that the tensor is in, or is wanted in."""
    if _REGION not in tensor.parameters:
        return None
    region = _place(tensor, _REGION, "string_param")
    offset = _place(tensor, "shared_memory_offset", "int64_param")
    return regions.view(SharedMemorySlice(region, offset, _place(tensor, "shared_memory_byte_size", "int64_param")))


def _place(tensor: ProtoMessage, key: str, kind: str) -> Any:
    if key not in tensor.parameters:
        return 0
    parameter = tensor.parameters[key]
    if parameter.WhichOneof("parameter_choice") != kind:
        text = f"invalid value type for '{key}' parameter for tensor '{tensor.name}', expected {kind}."
        raise InvalidArgument(text, field=tensor.name)
    return getattr(parameter, kind)


# Inputs


def _inputs(message: ProtoMessage, regions: SharedMemoryRegistry, later: DeferredInputs) -> dict[str, Tensor]:
    inputs: dict[str, Tensor] = {}
    blobs = iter(message.raw_input_contents)
    contents = message.contents if isinstance(message, LazyInferRequest) else {}
    for place, given in enumerate(message.inputs):
        if given.name in inputs:
            raise InvalidArgument(f"input '{given.name}' already exists in request", field=given.name)
        lent = _memory(given, regions) if given.parameters else None
        typed = place in contents or given.HasField("contents")
        if lent is None:
            data = _data(given, message, typed, None if typed else next(blobs, None))
        elif typed:
            text = f"unexpected 'content' provided when using shared memory for input tensor '{given.name}' for model"
            raise InvalidArgument(f"{text} '{message.model_name}'", field=given.name)
        else:
            data = lent
        inputs[given.name] = _input(given, message, contents.get(place), data, later)
    return inputs


def _input(
    given: ProtoMessage,
    message: ProtoMessage,
    contents: memoryview | None,
    data: raw_tensors.RawBytes | None,
    later: DeferredInputs,
) -> Tensor:
    """Of raw `data`, of long typed `contents`, or of those in the message."""
    shape, place = tuple(given.shape), _place_of(given, message)
    if contents is not None:
        tensor = deferred_tensors.placeholder_tensor(given.datatype, shape, place)
        later[given.name] = partial(asyncio.to_thread, _long_contents, given, contents, place)
        return tensor
    if data is None:
        return Tensor(given.name, given.datatype, shape, _contents(given, place))
    if given.datatype == "BYTES" and len(data) > deferred_tensors.LONG_STRING_BYTES:
        tensor = deferred_tensors.placeholder_tensor(given.datatype, shape, place)
        later[given.name] = deferred_tensors.deferred_strings(tensor, data, place)
        return tensor
    return raw_tensors.decode(given.datatype, shape, data, place)


def _data(
    given: ProtoMessage, message: ProtoMessage, typed: bool, blob: raw_tensors.RawBytes | None
) -> raw_tensors.RawBytes | None:
    """What is raw of the input; None of one with `typed` contents."""
    if typed:
        if message.raw_input_contents:
            text = f"contents field must not be specified when using raw_input_contents for '{given.name}' for model"
            raise InvalidArgument(f"{text} '{message.model_name}'", field=given.name)
        return None
    if blob is None:
        text = f"unable to find data for input tensor '{given.name}' for model '{message.model_name}' in request."
        raise InvalidArgument(text, field=given.name)
    return blob


def _place_of(given: ProtoMessage, message: ProtoMessage) -> raw_tensors.InputRef:
    return raw_tensors.InputRef(message.id, message.model_name, given.name)


def _contents(given: ProtoMessage, place: raw_tensors.InputRef) -> NDArray[Any]:
    """The one typed field that is filled, as the input's datatype."""
    count = raw_tensors.element_count(given.datatype, tuple(given.shape), place)
    values = _values(given, given.contents, place)
    if given.datatype == "BYTES":
        return raw_tensors.string_array(list(values), count, place)
    return _numbers(values, given.datatype, count, place)


def _long_contents(given: ProtoMessage, contents: memoryview, place: raw_tensors.InputRef) -> Tensor:
    """The same of those that are still bytes, a piece at a time."""
    shape, datatype, done = tuple(given.shape), given.datatype, 0
    count = raw_tensors.element_count(datatype, shape, place)
    strings, numbers = [], [_numbers((), datatype, 0, place)]
    try:
        for piece in iter_contents(contents):
            values = _values(given, piece, place)
            done += len(values)
            if datatype == "BYTES":
                raw_tensors.check_string_count(count, max(count, done), place)
                strings += values
            else:
                numbers.append(_numbers(values, datatype, len(values), place))
    except DecodeError as error:
        raise InvalidArgument(str(error), field=given.name) from None
    if datatype == "BYTES":
        return Tensor(given.name, datatype, shape, raw_tensors.string_array(strings, count, place))
    size = np.dtype(NUMPY_TYPES.get(datatype, np.uint8)).itemsize
    raw_tensors.check_byte_size(count * size, done * size, place)
    return Tensor(given.name, datatype, shape, np.concatenate(numbers))


def _values(given: ProtoMessage, contents: ProtoMessage, place: raw_tensors.InputRef) -> Any:
    """Of the one field that is filled; raises `InvalidArgument` if it is another datatype's."""
    values: Any = ()
    for field, held in ((descriptor.name, value) for descriptor, value in contents.ListFields()):
        if _CONTENTS[field] != _NARROW.get(given.datatype, given.datatype):
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{given.name}' for model '{place.model}' "
                f"of type '{_CONTENTS[field]}', expected datatype '{given.datatype}'",
                field=given.name,
            )
        values = held
    return values


def _numbers(values: Any, datatype: str, count: int, place: raw_tensors.InputRef) -> NDArray[Any]:
    dtype: DTypeLike = NUMPY_TYPES.get(datatype, np.uint8)
    raw_tensors.check_byte_size(count * np.dtype(dtype).itemsize, len(values) * np.dtype(dtype).itemsize, place)
    return np.array(values, NUMPY_TYPES[_NARROW[datatype]] if datatype in _NARROW else dtype).astype(dtype)
