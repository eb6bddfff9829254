"""A v2 inference request over HTTP: JSON, or JSON with raw tensors behind it, or one raw tensor alone.

Knows v2's sections 3.1 to 3.4 and nothing of HTTP beyond its body. Tensors are views of it: nothing is copied but what
JSON, BYTES and BOOL hold.
"""

from dataclasses import dataclass, field
from typing import Any

from ...core.client_shared_memory import Regions, Span
from ...core.errors import InvalidArgument
from ...core.model import ModelConfig
from ...core.request import InferRequest, Scalar
from ...core.tensor import Tensor
from .. import deferred_tensors, json_tensors, raw_tensors, size_limits
from ..chunked_json import PIECE, Long, Values, read_object, whole
from ..json_values import (
    Buffer,
    Document,
    array,
    boolean,
    member,
    object_,
    parameter,
    parse_object,
    request_id,
    signed,
    string,
    unsigned,
)
from .header_cache import Outlines
from .infer_call import Call, Wanted
from .raw_binary_request import read_raw

_SOURCES = ("'data'", "'binary_data_size' in 'parameters'", "'shared_memory_region' in 'parameters'")
_ONE_SOURCE = f"Input must set only one of the following fields: {', '.join(_SOURCES)}."
_FLAGS = ("sequence_start", "sequence_end")
_NUMBERS = ("priority", "timeout")


@dataclass(frozen=True, slots=True)
class Reader:
    """Reads requests. `max_size`: the most bytes of JSON, and of a tensor in it; `max_raw_size`: of raw tensors."""

    regions: Regions = field(default_factory=Regions)
    max_size: int = 64 * 1024 * 1024
    max_raw_size: int = size_limits.MAX_RAW
    _outlines: Outlines = field(default_factory=Outlines, init=False)

    def read(
        self,
        config: ModelConfig,
        body: bytes | bytearray,
        header_length: int | None,
        document: Document | None = None,
    ) -> Call:
        """`header_length`: of the JSON in front of raw tensors; None: all is JSON; 0: nothing is. `document`: that
        JSON, if `open_document` has read it already.

        Raises:
            CharoniaError: it is no such request.
        """
        if header_length:
            known = self._outlines.call(config.name, body, header_length)
            return known or self._mixed(config, body, header_length, document)
        view = memoryview(body).toreadonly()
        if header_length == 0:
            size_limits.check_raw(len(body), self.max_raw_size)
            return Call(read_raw(config, view), {}, Wanted(binary=True))
        size_limits.check_json(len(body), self.max_size)
        return _Reading(config, None, self).call(parse_object(view) if document is None else document)

    def _mixed(
        self, config: ModelConfig, body: bytes | bytearray, header_length: int, document: Document | None
    ) -> Call:
        """JSON, and raw tensors behind it."""
        size_limits.check_json(header_length, self.max_size)
        view = memoryview(body).toreadonly()
        if document is None:
            document = parse_object(view[:header_length])
        call = _Reading(config, view[header_length:], self).call(document)
        self._outlines.learn(config.name, body, header_length, document, call)
        return call


async def open_document(text: Buffer) -> Document:
    """The JSON of a long request, but the data of inputs that is long itself; raises `InvalidArgument`."""
    if len(text) <= PIECE:
        return parse_object(text)
    document, values = await read_object(text), Values()
    inputs: Any = document.get("inputs")
    if isinstance(inputs, Long) and not inputs.is_object:
        document["inputs"] = inputs = await inputs.items(values)
        for index, each in enumerate(inputs):
            if isinstance(each, Long) and each.is_object:
                inputs[index] = given = await each.members(values)
                for key in given.keys() - {"data"}:
                    given[key] = await whole(given[key], values)
    return {key: value if key == "inputs" else await whole(value, values) for key, value in document.items()}


class _Reading:
    """One request being read; `blob` is what is left of the raw tensors, None where there can be none."""

    def __init__(self, config: ModelConfig, blob: memoryview | None, reader: Reader) -> None:
        self._config = config
        self._blob = blob
        self._reader = reader
        self._later: deferred_tensors.Later = {}
        self._id = ""

    def call(self, document: Document) -> Call:
        self._id = request_id(document["id"]) if "id" in document else ""
        binary, parameters = _parameters(document)
        inputs = self._inputs(array("inputs", member(document, "inputs")))
        wanted = self._outputs(array("outputs", document["outputs"])) if "outputs" in document else {}
        request = InferRequest(self._id, inputs, tuple(wanted) or None, parameters)
        return Call(request, wanted, Wanted(binary), self._later)

    def _inputs(self, given: list[Any]) -> dict[str, Tensor]:
        inputs: dict[str, Tensor] = {}
        for each in given:
            name, tensor = self._input(object_("inputs", each))
            if name in inputs:
                raise InvalidArgument(f"input '{name}' already exists in request", field=name)
            inputs[name] = tensor
        if self._blob:
            raise InvalidArgument(f"unexpected additional input data for model '{self._config.name}'")
        return inputs

    def _input(self, given: Document) -> tuple[str, Tensor]:
        name = string("name", member(given, "name"))
        datatype = string("datatype", member(given, "datatype"))
        shape = _shape(array("shape", member(given, "shape")))
        parameters = object_("parameters", given["parameters"]) if "parameters" in given else {}
        _check_one_source(name, given, parameters)
        place = raw_tensors.Place(self._id, self._config.name, name)
        if "data" in given:
            return name, self._from_json(datatype, shape, given["data"], place)
        if "binary_data_size" in parameters:
            data = self._next(name, unsigned("binary_data_size", parameters["binary_data_size"]))
        else:
            data = self._lent(parameters)
        if datatype == "BYTES" and len(data) > deferred_tensors.LONG:
            tensor = deferred_tensors.promise(datatype, shape, place)
            self._later[name] = deferred_tensors.strings(tensor, data, place)
            return name, tensor
        return name, raw_tensors.decode(datatype, shape, data, place)

    def _from_json(self, datatype: str, shape: tuple[int, ...], data: Any, place: raw_tensors.Place) -> Tensor:
        json_tensors.refuse_binary_only(datatype, place.input)
        count = raw_tensors.element_count(datatype, shape, place)
        size_limits.check_json_tensor(place.input, json_tensors.byte_size(datatype, count), self._reader.max_size)
        if type(data) is Long:
            tensor = deferred_tensors.promise(datatype, shape, place)
            self._later[place.input] = deferred_tensors.from_json(tensor, data, place)
            return tensor
        values = json_tensors.flat(array("data", data))
        if datatype not in json_tensors.READABLE:  # no model has such an input, which is said later
            return raw_tensors.decode(datatype, shape, b"", place)
        json_tensors.check_count(datatype, count, len(values))
        return Tensor(place.input, datatype, shape, json_tensors.elements(datatype, values, "data").reshape(shape))

    def _next(self, name: str, size: int) -> memoryview:
        """The next raw tensor."""
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

    def _outputs(self, given: list[Any]) -> dict[str, Wanted]:
        wanted: dict[str, Wanted] = {}
        for each in given:
            output = object_("outputs", each)
            name = string("name", member(output, "name"))
            if name in wanted:
                raise InvalidArgument(f"Duplicate output name '{name}' is not allowed in a request", field=name)
            parameters = object_("parameters", output["parameters"]) if "parameters" in output else {}
            wanted[name] = self._wanted(parameters) if parameters else Wanted()
        return wanted

    def _wanted(self, parameters: Document) -> Wanted:
        binary = boolean("binary_data", parameters["binary_data"]) if "binary_data" in parameters else False
        classes = unsigned("classification", parameters["classification"]) if "classification" in parameters else 0
        if "classification" in parameters and not classes:
            raise InvalidArgument("Unable to parse 'classification': it must be above 0", field="classification")
        if "shared_memory_region" not in parameters:
            return Wanted(binary, classes)
        for other, there in (("classification", classes), ("binary_data", binary)):
            if there:
                raise InvalidArgument(f"Output can't set both 'shared_memory_region' and '{other}'", field=other)
        return Wanted(memory=self._lent(parameters))

    def _lent(self, parameters: Document) -> memoryview:
        """The shared memory that a tensor is in, or is wanted in."""
        region = string("shared_memory_region", parameters["shared_memory_region"])
        offset = unsigned("shared_memory_offset", parameters.get("shared_memory_offset", 0))
        size = unsigned("shared_memory_byte_size", member(parameters, "shared_memory_byte_size"))
        return self._reader.regions.view(Span(region, offset, size))


def _shape(dims: list[Any]) -> tuple[int, ...]:
    for dim in dims:
        if type(dim) is not int:
            signed("shape", dim)
    return tuple(dims)


def _check_one_source(name: str, given: Document, parameters: Document) -> None:
    sources = ("data" in given, "binary_data_size" in parameters, "shared_memory_region" in parameters)
    if sources.count(True) == 1:
        return
    found = [source.split()[0] for source, there in zip(_SOURCES, sources, strict=True) if there]
    said = f"But set {' '.join(found)}" if found else "But no field is set"
    raise InvalidArgument(f"{_ONE_SOURCE} {said}", field=name)


def _parameters(document: Document) -> tuple[bool, dict[str, Scalar]]:
    """Whether outputs that nobody names are binary, and what the model is told."""
    if "parameters" not in document:
        return False, {}
    given = object_("parameters", document["parameters"])
    binary = boolean("binary_data_output", given["binary_data_output"]) if "binary_data_output" in given else False
    return binary, {key: _parameter(key, value) for key, value in given.items() if key != "binary_data_output"}


def _parameter(key: str, value: Any) -> Scalar:
    if key.startswith("triton_"):
        raise InvalidArgument(
            "parameter keys starting with 'triton_' are reserved for Triton usage and should not be specified.",
            field=key,
        )
    if key in _FLAGS:
        return boolean(key, value)
    if key in _NUMBERS:
        return unsigned(key, value)
    if key == "sequence_id":
        return value if type(value) is int and 0 <= value < 2**64 else string(key, value)
    return parameter(string("parameters", key), value)
