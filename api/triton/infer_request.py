"""The body of a v2 inference request over HTTP: JSON, or JSON with raw tensors behind it, or one raw tensor alone.

Tensors are views of the body; only elements of JSON, BYTES and BOOL are copied. The form is described at
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md.
"""

import math
import re
from array import array
from dataclasses import dataclass, field
from functools import partial
from secrets import token_hex
from typing import Any

import msgspec
import numpy as np
import orjson

from ...core.errors import InvalidArgument, request_id_prefix
from ...core.model import ModelConfig
from ...core.request import InferRequest, ParameterValue
from ...core.tensor import Tensor
from ...processes.client_shared_memory import LentMemory, SharedMemoryRegistry, SharedMemorySlice
from .. import infer_call, json_tensors, raw_tensors, size_limits
from ..chunked_json import PIECE_BYTES, UnparsedContainer, ValueBudget, parse_fully, read_json_object
from ..infer_call import InferCall, RequestedOutput
from ..json_tensors import (
    Buffer,
    JsonObject,
    as_array,
    as_boolean,
    as_object,
    as_parameter,
    as_request_id,
    as_signed,
    as_string,
    as_unsigned,
    parse_json,
    parse_json_object,
    required_member,
    wrong_json_type,
)
from ..raw_tensors import DeclaredInput, RawBytes
from ..request_outlines import LONGEST_OUTLINE, RequestOutline, keep_latest, outline_of


class HeaderCache:
    """The latest headers, by model and text."""

    def __init__(self) -> None:
        self._outlines: dict[tuple[str, bytes], RequestOutline] = {}

    def __len__(self) -> int:
        return len(self._outlines)

    def find(self, model: str, body: bytes | bytearray, length: int) -> InferCall | None:
        """The request that this body is, if one with the same header, `length` bytes long, was remembered."""
        if length > LONGEST_OUTLINE or type(body) is not bytes:
            return None
        outline = self._outlines.get((model, body[:length]))
        return None if outline is None else outline.fill(body, length)

    def remember(self, model: str, body: bytes | bytearray, length: int, document: JsonObject, call: InferCall) -> None:
        """Keep the header of a body that was parsed, unless it has tensors: `document` is its JSON, `call` the
        request."""
        if length > LONGEST_OUTLINE or any(
            "binary_data_size" not in item.get("parameters", ()) for item in document["inputs"]
        ):
            return
        outline = outline_of(call)
        if outline is not None:
            keep_latest(self._outlines, (model, bytes(body[:length])), outline)


_FLAT_DATA = re.compile(rb'"data": ?(\[[-+.0-9eE, ]*\])')
"""What the JSON of an input's numbers looks like, unless they are nested."""
_HOLE = token_hex(16)
"""Stands for numbers; no client can know it and send it."""


class BodyCache:
    """The latest bodies of nothing but JSON, by model and the texts around their numbers."""

    def __init__(self) -> None:
        self._outlines: dict[tuple[str | bytes, ...], RequestOutline] = {}

    def __len__(self) -> int:
        return len(self._outlines)

    def find(self, model: str, body: bytes | bytearray) -> InferCall | None:
        """The request that this body is, if one alike but for its numbers was remembered. None also for one that is to
        be refused."""
        if len(body) > LONGEST_OUTLINE or type(body) is not bytes:
            return None
        texts = _FLAT_DATA.split(body)
        outline = self._outlines.get((model, *texts[::2]))
        if outline is None:
            return None
        inputs = {}
        try:
            for (name, datatype, shape, dtype, *_), numbers in zip(outline.tensors, texts[1::2], strict=True):
                data = np.frombuffer(array(dtype.char, orjson.loads(numbers)), dtype)
                inputs[name] = Tensor(name, datatype, shape, data.reshape(shape))
        except (ValueError, TypeError, OverflowError):
            return None
        return outline.with_inputs(inputs)

    def remember(self, model: str, body: bytes | bytearray, call: InferCall) -> None:
        """Keep the texts of a body that `call` was read from, unless it has other data than numbers, or they are
        nested."""
        outline = None if len(body) > LONGEST_OUTLINE else outline_of(call)
        if outline is None:
            return
        texts = _FLAT_DATA.split(bytes(body))
        holes = [f"{_HOLE}{number}" for number in range(len(texts) // 2)]
        around = texts[::2]
        texts[1::2] = [b'"data":"%b"' % hole.encode() for hole in holes]
        # Nothing else of the body may look like an input's numbers.
        if [item.get("data") for item in parse_json(b"".join(texts))["inputs"]] == holes:
            keep_latest(self._outlines, (model, *around), outline)


_SOURCES = ("'data'", "'binary_data_size' in 'parameters'", "'shared_memory_region' in 'parameters'")
_RAW_OUTPUT = RequestedOutput(binary=True)
_ONE_SOURCE = f"Input must set only one of the following fields: {', '.join(_SOURCES)}."
_FLAGS = ("sequence_start", "sequence_end")
_NUMBERS = ("priority", "timeout")


@dataclass(frozen=True, slots=True)
class InferRequestReader:
    """Reads request bodies. `max_size`: bytes of JSON, and of a tensor in it; `max_raw_size`: bytes of raw tensors."""

    regions: SharedMemoryRegistry = field(default_factory=SharedMemoryRegistry)
    max_size: int = size_limits.MAX_JSON_BYTES
    max_raw_size: int = size_limits.MAX_RAW_BYTES
    headers: HeaderCache = field(default_factory=HeaderCache, init=False)
    bodies: BodyCache = field(default_factory=BodyCache, init=False)

    def read(
        self,
        config: ModelConfig,
        body: bytes | bytearray,
        header_length: int | None,
        document: JsonObject | None = None,
    ) -> InferCall:
        """The request that `body` is.

        `header_length`: bytes of the JSON in front of raw tensors; None: all is JSON; 0: nothing is. `document`: that
        JSON, if `parse_long_document` has read it already. Raises `CharoniaError` if the body is no such request.
        """
        json_size = len(body) if header_length is None else header_length
        if json_size > self.max_size:
            raise size_limits.json_too_large(json_size, self.max_size)
        if header_length is None:
            known = self.bodies.find(config.name, body)
        else:
            known = self.headers.find(config.name, body, header_length)
        if known is not None:
            return known
        view = memoryview(body).toreadonly()
        if header_length == 0:
            if len(body) > self.max_raw_size:
                raise size_limits.raw_too_large(len(body), self.max_raw_size)
            return InferCall(_read_raw_request(config, view), {}, _RAW_OUTPUT)
        if document is None:
            document = parse_json_object(view[:json_size])
        call = _Reading(config, view[json_size:] if header_length else None, self).call(document)
        if header_length:
            self.headers.remember(config.name, body, header_length, document, call)
        else:
            self.bodies.remember(config.name, body, call)
        return call


async def parse_long_document(text: Buffer) -> JsonObject:
    """The JSON of a long request, parsed but for the data of inputs that is long itself.

    Raises `InvalidArgument` if it is no JSON object.
    """
    if len(text) <= PIECE_BYTES:
        return parse_json_object(text)
    document, values = await read_json_object(text), ValueBudget()
    inputs: Any = document.get("inputs")
    if isinstance(inputs, UnparsedContainer) and not inputs.is_object:
        document["inputs"] = inputs = await inputs.items(values)
        for index, item in enumerate(inputs):
            if isinstance(item, UnparsedContainer) and item.is_object:
                inputs[index] = members = await item.members(values)
                for key in members.keys() - {"data"}:
                    members[key] = await parse_fully(members[key], values)
    return {key: value if key == "inputs" else await parse_fully(value, values) for key, value in document.items()}


class _Reading:
    """The reading of one request. `blob`: the raw tensors that are not read yet, None where there can be none."""

    def __init__(self, config: ModelConfig, blob: memoryview | None, reader: InferRequestReader) -> None:
        self._config = config
        self._blob = blob
        self._reader = reader
        self._deferred: infer_call.DeferredInputs = {}
        self._id = ""

    def call(self, document: JsonObject) -> InferCall:
        self._id = as_request_id(document["id"]) if "id" in document else ""
        binary, parameters = False, {}
        if "parameters" in document:
            members = as_object("parameters", document["parameters"])
            binary = as_boolean("binary_data_output", members.get("binary_data_output", False))
            parameters = {key: _parameter(key, value) for key, value in members.items() if key != "binary_data_output"}
        inputs = self._inputs(as_array("inputs", required_member(document, "inputs")))
        outputs = self._outputs(as_array("outputs", document["outputs"])) if "outputs" in document else {}
        request = InferRequest(self._id, inputs, tuple(outputs) or None, parameters)
        return InferCall(request, outputs, RequestedOutput(binary=binary), self._deferred)

    def _inputs(self, items: list[Any]) -> dict[str, Tensor]:
        inputs: dict[str, Tensor] = {}
        for item in items:
            name, tensor = self._input(as_object("inputs", item))
            if name in inputs:
                raise InvalidArgument(f"input '{name}' already exists in request", field=name)
            inputs[name] = tensor
        if self._blob:
            raise InvalidArgument(f"unexpected additional input data for model '{self._config.name}'")
        return inputs

    def _input(self, members: JsonObject) -> tuple[str, Tensor]:
        name = as_string("name", required_member(members, "name"))
        datatype = as_string("datatype", required_member(members, "datatype"))
        shape = tuple(as_array("shape", required_member(members, "shape")))
        for dim in shape:
            if type(dim) is not int:
                as_signed("shape", dim)
        parameters = as_object("parameters", members["parameters"]) if "parameters" in members else {}
        _check_one_source(name, members, parameters)
        declared = DeclaredInput(self._id, self._config.name, name, datatype, shape)
        if "data" in members:
            return name, self._from_json(declared, members["data"])
        data: RawBytes | LentMemory
        if "binary_data_size" in parameters:
            data = self._next_raw(name, as_unsigned("binary_data_size", parameters["binary_data_size"]))
        else:
            data = self._shared_memory(parameters)
        return name, infer_call.raw_input(declared, data, self._deferred)

    def _from_json(self, declared: DeclaredInput, data: Any) -> Tensor:
        name, datatype = declared.name, declared.datatype
        json_tensors.refuse_binary_only(datatype, name)
        count = raw_tensors.element_count(declared)
        size = json_tensors.byte_size(datatype, count)
        if size > self._reader.max_size:
            raise size_limits.json_tensor_too_large(name, size, self._reader.max_size)
        if type(data) is UnparsedContainer:
            if data.is_object:
                raise wrong_json_type("data", "non-array as array")
            return infer_call.defer(declared, partial(infer_call.decode_long_json, declared, data), self._deferred)
        values = json_tensors.flatten(as_array("data", data))
        if datatype not in json_tensors.JSON_DATATYPES:  # no model has such an input, which is said later
            return raw_tensors.decode(declared, b"")
        json_tensors.check_element_count(datatype, count, len(values))
        return declared.tensor(json_tensors.to_array(datatype, values, "data").reshape(declared.shape))

    def _next_raw(self, name: str, size: int) -> memoryview:
        """The bytes of the next raw tensor."""
        if self._blob is None:
            raise InvalidArgument(
                "must specify valid 'Infer-Header-Content-Length' in request header and 'binary_data_size' when "
                "passing inputs in binary data format",
                field=name,
            )
        data, self._blob = self._blob[:size], self._blob[size:]
        if len(data) < size:
            missing = size - len(data)
            text = f"unexpected size for input '{name}', expecting {missing} additional bytes for model"
            raise InvalidArgument(f"{text} '{self._config.name}'", field=name)
        return data

    def _outputs(self, items: list[Any]) -> dict[str, RequestedOutput]:
        outputs: dict[str, RequestedOutput] = {}
        for item in items:
            output = as_object("outputs", item)
            name = as_string("name", required_member(output, "name"))
            if name in outputs:
                raise InvalidArgument(f"output '{name}' already exists in request", field=name)
            if "parameters" not in output:
                outputs[name] = RequestedOutput()
                continue
            parameters = as_object("parameters", output["parameters"])
            binary = as_boolean("binary_data", parameters.get("binary_data", False))
            classes = as_unsigned("classification", parameters.get("classification", 0))
            if "classification" in parameters and not classes:
                raise InvalidArgument("Unable to parse 'classification': it must be above 0", field="classification")
            memory = None
            if "shared_memory_region" in parameters:
                for other, value in (("classification", classes), ("binary_data", binary)):
                    if value:
                        message = f"Output can't set both 'shared_memory_region' and '{other}'"
                        raise InvalidArgument(message, field=other)
                memory = self._shared_memory(parameters)
            outputs[name] = RequestedOutput(classes, memory, binary)
        return outputs

    def _shared_memory(self, parameters: JsonObject) -> LentMemory:
        """The memory that an input is in, or an output is to be written to."""
        region = as_string("shared_memory_region", parameters["shared_memory_region"])
        offset = as_unsigned("shared_memory_offset", parameters.get("shared_memory_offset", 0))
        size = as_unsigned("shared_memory_byte_size", required_member(parameters, "shared_memory_byte_size"))
        return self._reader.regions.view(SharedMemorySlice(region, offset, size))


def _check_one_source(name: str, members: JsonObject, parameters: JsonObject) -> None:
    if not parameters and "data" in members:  # the usual one
        return
    sources = ("data" in members, "binary_data_size" in parameters, "shared_memory_region" in parameters)
    if sources.count(True) == 1:
        return
    sources_set = [source.split()[0] for source, is_set in zip(_SOURCES, sources, strict=True) if is_set]
    problem = f"But set {' '.join(sources_set)}" if sources_set else "But no field is set"
    raise InvalidArgument(f"{_ONE_SOURCE} {problem}", field=name)


def _parameter(key: str, value: Any) -> ParameterValue:
    if key.startswith("triton_"):
        raise InvalidArgument(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
            field=key,
        )
    if key in _FLAGS:
        return as_boolean(key, value)
    if key in _NUMBERS:
        return as_unsigned(key, value)
    if key == "sequence_id":
        return value if type(value) is int and 0 <= value < 2**64 else as_string(key, value)
    return as_parameter(as_string("parameters", key), value)


def _read_raw_request(config: ModelConfig, body: memoryview) -> InferRequest:
    """The request of a body that is the one input of its model, whose one free dimension the number of bytes says.

    The tensor is a view of the body; text is one element. Raises `InvalidArgument` if the model has other inputs.
    """
    if len(config.inputs) != 1:
        text = f"to be deduced but got {len(config.inputs)} inputs in '{config.name}' model configuration"
        raise InvalidArgument(f"{request_id_prefix('')}Raw request must only have 1 input (found 1) {text}", field="")
    [spec] = config.inputs
    declared = DeclaredInput("", config.name, spec.name, spec.datatype, spec.dims)
    free = spec.dims.count(-1)
    if free > 1:
        text = f"The shape of the raw input '{spec.name}' can not be deduced because there are more than one"
        raise declared.error(f"{text} variable-sized dimension")
    count = math.prod(dim for dim in spec.dims if dim >= 0)
    if spec.datatype == "BYTES":
        if free or count != 1:
            raise declared.error(f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1]")
        tensor = declared.tensor(raw_tensors.string_array(declared, [bytes(body)], 1))
    else:
        row = json_tensors.byte_size(spec.datatype, count)
        shape = tuple((len(body) // row if row else 0) if dim < 0 else dim for dim in spec.dims)
        tensor = raw_tensors.decode(msgspec.structs.replace(declared, shape=shape), body)
    if config.max_batch_size > 0:
        tensor = msgspec.structs.replace(tensor, shape=(1, *tensor.shape))
    return InferRequest(inputs={spec.name: tensor})
