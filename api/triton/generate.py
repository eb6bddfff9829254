"""The generate extension: a JSON body becomes an InferRequest, an InferResponse becomes a JSON object.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_generate.md. Knows nothing of HTTP.
"""

import json
from collections.abc import Mapping
from typing import Any

import numpy as np

from ...core.errors import InvalidArgument
from ...core.model import ModelConfig
from ...core.request import InferRequest, InferResponse, ParameterValue
from ...core.tensor import Tensor, TensorSpec
from .. import json_tensors, raw_tensors
from ..chunked_json import MAX_IDS, PIECE_BYTES, UnparsedContainer, ValueBudget, parse_fully, read_long_json
from ..infer_call import ResponseSize
from ..json_tensors import Buffer, as_parameter, as_request_id, as_string, malformed_json, unreadable_json
from ..size_limits import MAX_RESPONSE_BYTES

_SAMPLING = "sampling_parameters"

SHORT_TEXT_BYTES = 4096
"""The most bytes of a string that is encoded by itself, whatever else a response may have."""


class JsonObjectPairs(list[tuple[str, Any]]):
    """The members of a JSON object in their order, repeated keys included; a type of its own, unlike a JSON array's."""


async def parse_long_generate_body(body: bytes | bytearray, config: ModelConfig) -> bytes | JsonObjectPairs:
    """The members of a long body, inputs of numbers as numpy arrays; a short body as it is.

    Raises `InvalidArgument` for malformed JSON, or a list that is longer than any parameter's.
    """
    if len(body) <= PIECE_BYTES:
        return bytes(body)
    container, values = await read_long_json(body), ValueBudget()
    if not isinstance(container, UnparsedContainer) or not container.is_object:
        raise malformed_json("the body must be a JSON object")
    specs = {spec.name: spec for spec in config.inputs}
    members = JsonObjectPairs()
    for key, value in await container.pairs(_load, values):
        if key == "parameters" and isinstance(value, UnparsedContainer) and value.is_object:
            nested = await value.pairs(_load, values)
            opened = JsonObjectPairs([(name, await _opened(specs.get(name), member)) for name, member in nested])
        else:
            opened = await _opened(specs.get(key), value)
        members.append((key, opened))
    return members


async def _opened(spec: TensorSpec | None, value: Any) -> Any:
    """The value of a member, parsed if it is still text; `spec`: the input that it is, if it is one."""
    if spec is None or spec.datatype == "BYTES" or not isinstance(value, UnparsedContainer) or value.is_object:
        return await parse_fully(value, ValueBudget())
    json_tensors.refuse_binary_only(spec.datatype, spec.name)
    pieces, values = [], ValueBudget(MAX_IDS)
    async for elements in value.flat_elements():
        values.take(len(elements))
        pieces.append(json_tensors.to_array(spec.datatype, elements, spec.name))
    return np.concatenate(pieces)


def generate_body_to_infer_request(body: bytes | JsonObjectPairs, config: ModelConfig, stream: bool) -> InferRequest:
    """Translate a generate body for the model that `config` describes; `stream` fills an absent `stream` input.

    Raises `InvalidArgument` for malformed JSON, or a member of the wrong type.
    """
    mapping = _Mapping(config)
    try:
        members = _load(body) if isinstance(body, bytes) and body else body or JsonObjectPairs()
        if not isinstance(members, JsonObjectPairs):
            raise malformed_json("the body must be a JSON object")
        for key, value in members:
            mapping.take(key, value)
        return mapping.build_request(stream)
    except RecursionError as error:
        raise unreadable_json(error) from None


def encode_generate_response(
    config: ModelConfig, request_id: str, response: InferResponse, limit: int = MAX_RESPONSE_BYTES
) -> bytes:
    """One model response as one JSON object with sorted keys. `limit`: see `ResponseSize`. Raises `InvalidArgument` if
    an output cannot be JSON."""
    size = ResponseSize(limit)
    for tensor in response.outputs:
        size.add(tensor, as_json=True)
    members: dict[str, Any] = {"model_name": config.name, "model_version": config.version, **response.parameters}
    if request_id:
        members["id"] = request_id
    if is_long(response):
        return _long_json(members, response, all(map(json_tensors.is_strict_json, response.outputs)))
    strict = True
    for tensor in response.outputs:
        values = json_tensors.to_list(tensor)
        strict = strict and json_tensors.is_strict_json(tensor, values)
        members[tensor.name] = _one_or_all(values)
    return json_tensors.dump_json(members, strict, ordered=True)


def short_text(response: InferResponse) -> str | None:
    """The text of a response that is nothing but one short string, as nearly all of a language model's are."""
    if len(response.outputs) != 1 or response.parameters:
        return None
    [output] = response.outputs
    if output.datatype != "BYTES" or output.data.size != 1:
        return None
    data: bytes = output.scalar
    if len(data) > SHORT_TEXT_BYTES:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def is_long(response: InferResponse) -> bool:
    """Whether encoding the response takes longer than the event loop should be held."""
    return any(map(raw_tensors.is_long, response.outputs))


def _long_json(members: dict[str, Any], response: InferResponse, strict: bool) -> bytes:
    """The object, made in pieces of which none takes long."""
    texts = {key: [json_tensors.dump_json(value, strict)] for key, value in members.items()}
    for tensor in response.outputs:
        if raw_tensors.is_long(tensor):
            texts[tensor.name] = [b"[", *json_tensors.encode_in_pieces(tensor, strict), b"]"]
        else:
            texts[tensor.name] = [json_tensors.dump_json(_one_or_all(json_tensors.to_list(tensor)), strict)]
    said = [b"".join((json_tensors.dump_json(key, strict), b":", *parts)) for key, parts in sorted(texts.items())]
    return b"{" + b",".join(said) + b"}"


def _one_or_all(values: list[Any]) -> Any:
    return values[0] if len(values) == 1 else values


def _load(body: Buffer, offset: int = 0) -> Any:
    # The standard library's parser, because it shows repeated keys and reads NaN, as Triton's does.
    try:
        return json.loads(bytes(body).decode(), object_pairs_hook=JsonObjectPairs)
    except (ValueError, RecursionError) as error:
        raise unreadable_json(error, offset) from None


def _as_json(key: str, value: Any) -> Any:
    if isinstance(value, JsonObjectPairs):
        return {as_string(key, name): _as_json(key, member) for name, member in value}
    if isinstance(value, list):
        return [_as_json(key, element) for element in value]
    return as_string(key, value) if isinstance(value, str) else value


class _Mapping:
    """Sorts the members of a body into tensors and parameters."""

    def __init__(self, config: ModelConfig) -> None:
        self._batched = config.max_batch_size > 0
        self._implied_stream = config.implied_stream
        self._specs = {spec.name: spec for spec in config.inputs}
        self._nested: dict[str, Any] = {}
        """Parameters that are lists or objects."""
        self._id = ""
        self._tensors: dict[str, Tensor] = {}
        self._parameters: dict[str, ParameterValue] = {}

    def take(self, key: str, value: Any) -> None:
        """Add a top-level member: `parameters` is flattened; `id` is the request's id and a parameter as well."""
        if key == "id":
            self._id = as_request_id(value)
        if key != "parameters":
            return self._take_member(key, value)
        if "parameters" in self._specs:
            raise InvalidArgument("Keyword 'parameters' for nested schema also given as input tensor name")
        if not isinstance(value, JsonObjectPairs):
            raise InvalidArgument("Expected JSON object for keyword: 'parameters'", field="parameters")
        try:
            for name, member in value:
                self._take_member(name, member)
        except InvalidArgument as error:
            message = f"Converting keyword: 'parameters': {error.message}"
            raise InvalidArgument(message, field=error.field) from None

    def _take_member(self, key: str, value: Any) -> None:
        as_string(key, key)
        if key in self._tensors:
            raise InvalidArgument(f"input '{key}' already exists in request", field=key)
        spec = self._specs.get(key)
        if value is None and (spec is None or spec.optional):
            return  # asks for nothing
        if spec is not None:
            self._tensors[key] = json_tensors.input_tensor(spec, value, self._batched)
        elif isinstance(value, list) and self._has(_SAMPLING, "BYTES"):
            self._nested[key] = _as_json(key, value)
        else:
            self._parameters[key] = as_parameter(key, value)

    def _has(self, name: str, datatype: str) -> bool:
        spec = self._specs.get(name)
        return spec is not None and spec.datatype == datatype

    def build_request(self, stream: bool) -> InferRequest:
        """The request of the members taken; `stream` fills an absent `stream` input, where the model's config says so.

        Lists and objects, which v2 parameters cannot be, go with scalars as JSON into the input that is made for them.
        """
        if self._implied_stream and self._has("stream", "BOOL") and "stream" not in self._tensors:
            self._tensors["stream"] = json_tensors.input_tensor(self._specs["stream"], stream, self._batched)
        if self._nested:
            sampling: dict[str, Any] = {key: value for key, value in self._parameters.items() if key != "id"}
            sampling |= self._nested
            if _SAMPLING in self._tensors:
                sampling |= _sampling_object(self._tensors[_SAMPLING])
            self._tensors[_SAMPLING] = json_tensors.input_tensor(self._specs[_SAMPLING], json.dumps(sampling), False)
        return InferRequest(self._id, self._tensors, None, self._parameters)


def _sampling_object(tensor: Tensor) -> Mapping[str, Any]:
    try:
        members = json.loads(tensor.scalar)
    except ValueError as error:
        raise InvalidArgument(f"Unable to parse '{_SAMPLING}': {error}", field=_SAMPLING) from None
    if not isinstance(members, dict):
        raise InvalidArgument(f"Unable to parse '{_SAMPLING}': it must be a JSON object", field=_SAMPLING)
    return members
