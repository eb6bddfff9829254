"""The generate extension: a JSON body becomes an InferRequest, an InferResponse becomes a JSON object.

Knows nothing of HTTP and of how a model computes; v2's section 8 in code.
"""

import json
import math
from collections.abc import Mapping
from typing import Any

from ..core.errors import InvalidArgument
from ..core.model import ModelConfig
from ..core.request import InferRequest, InferResponse, Scalar
from ..core.tensor import Tensor, TensorSpec
from . import json_tensors
from .json_values import malformed, parameter, string, unreadable

Pairs = list[tuple[str, Any]]
"""A JSON object as it was written: order and repeated keys included."""

_SAMPLING = "sampling_parameters"


def parse_generate(body: bytes, config: ModelConfig, stream: bool) -> InferRequest:
    """Translate a generate body for the model that `config` describes; `stream` fills an absent `stream` input.

    Raises:
        InvalidArgument: malformed JSON, or a member of the wrong type.
    """
    mapping = _Mapping(config)
    try:
        for key, value in _members(_load(body) if body else _Object()):
            mapping.take(key, value)
        mapping.default_stream(stream)
        mapping.move_lists()
    except RecursionError as error:
        raise unreadable(error) from None
    return InferRequest(mapping.id, mapping.tensors, None, mapping.parameters)


def encode_response(config: ModelConfig, request_id: str, response: InferResponse) -> bytes:
    """One model response as one JSON object with sorted keys."""
    members: dict[str, Any] = {"model_name": config.name, "model_version": config.version, **response.parameters}
    if request_id:
        members["id"] = request_id
    for tensor in response.outputs:
        members[tensor.name] = _plain(tensor)
    strict = all(map(json_tensors.finite, response.outputs))
    return json_tensors.dump(members, strict, ordered=True)


def _plain(tensor: Tensor) -> Any:
    values = json_tensors.listed(tensor)
    return values[0] if len(values) == 1 else values


class _Object(Pairs):
    """A JSON object, told apart from a JSON array."""


def _load(body: bytes) -> Any:
    # The standard library's parser, because it shows repeated keys and reads NaN, as Triton's does.
    try:
        return json.loads(body.decode(), object_pairs_hook=_Object)
    except ValueError as error:
        raise unreadable(error) from None


def _members(document: Any) -> Pairs:
    if not isinstance(document, _Object):
        raise malformed("the body must be a JSON object")
    return document


def _as_json(key: str, value: Any) -> Any:
    if isinstance(value, _Object):
        return {string(key, name): _as_json(key, member) for name, member in value}
    if isinstance(value, list):
        return [_as_json(key, element) for element in value]
    return string(key, value) if isinstance(value, str) else value


class _Mapping:
    """Sorts the members of a body into tensors and parameters."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config
        self._specs = {spec.name: spec for spec in config.inputs}
        self._lists: dict[str, list[Any]] = {}
        self.id = ""
        self.tensors: dict[str, Tensor] = {}
        self.parameters: dict[str, Scalar] = {}

    def take(self, key: str, value: Any) -> None:
        """A top-level member: `parameters` is flattened, `id` is the request's and a member like any other."""
        if key == "parameters":
            return self._take_nested(value)
        if key == "id":
            self.id = string("id", value)
        return self._take_member(key, value)

    def _take_nested(self, value: Any) -> None:
        if "parameters" in self._specs:
            raise InvalidArgument("Keyword 'parameters' for nested schema also given as input tensor name")
        if not isinstance(value, _Object):
            raise InvalidArgument("Expected JSON object for keyword: 'parameters'", field="parameters")
        try:
            for key, member in value:
                self._take_member(key, member)
        except InvalidArgument as error:
            message = f"Converting keyword: 'parameters': {error.message}"
            raise InvalidArgument(message, field=error.field) from None

    def _take_member(self, key: str, value: Any) -> None:
        string(key, key)
        if key in self.tensors:
            raise InvalidArgument(f"input '{key}' already exists in request", field=key)
        if key in self._specs:
            self.tensors[key] = _tensor(self._specs[key], value, self._config.max_batch_size > 0)
        elif type(value) is list and self._has(_SAMPLING, "BYTES"):
            self._lists[key] = _as_json(key, value)
        else:
            self.parameters[key] = parameter(key, value)

    def _has(self, name: str, datatype: str) -> bool:
        spec = self._specs.get(name)
        return spec is not None and spec.datatype == datatype

    def default_stream(self, stream: bool) -> None:
        if self._has("stream", "BOOL") and "stream" not in self.tensors:
            self.tensors["stream"] = _tensor(self._specs["stream"], stream, self._config.max_batch_size > 0)

    def move_lists(self) -> None:
        """A v2 parameter cannot be a list: lists travel as JSON in the input made for it, scalars along with them."""
        if not self._lists:
            return
        sampling: dict[str, Any] = {key: value for key, value in self.parameters.items() if key != "id"}
        sampling |= self._lists
        if _SAMPLING in self.tensors:
            sampling |= _sampling_object(self.tensors[_SAMPLING])
        self.tensors[_SAMPLING] = _tensor(self._specs[_SAMPLING], json.dumps(sampling), False)


def _sampling_object(tensor: Tensor) -> Mapping[str, Any]:
    try:
        members = json.loads(tensor.scalar)
    except ValueError as error:
        raise InvalidArgument(f"Unable to parse '{_SAMPLING}': {error}", field=_SAMPLING) from None
    if not isinstance(members, dict):
        raise InvalidArgument(f"Unable to parse '{_SAMPLING}': it must be a JSON object", field=_SAMPLING)
    return members


def _tensor(spec: TensorSpec, value: Any, batched: bool) -> Tensor:
    values = value if type(value) is list else [value]
    json_tensors.refuse_binary_only(spec.datatype, spec.name)
    data = json_tensors.elements(spec.datatype, values, spec.name)
    shape = _shape(spec, len(values), (-1, *spec.dims) if batched else spec.dims)
    return Tensor(spec.name, spec.datatype, shape, data.reshape(shape))


def _shape(spec: TensorSpec, count: int, dims: tuple[int, ...]) -> tuple[int, ...]:
    """Fixed dims as they are, the innermost free one takes what remains, other free ones are 1."""
    free = [axis for axis, dim in enumerate(dims) if dim < 0]
    fixed = math.prod(dim for dim in dims if dim >= 0)
    rest, odd = divmod(count, fixed) if fixed else (0, count)
    if odd or (not free and rest != 1):
        message = f"The schema can not convert input '{spec.name}' to tensor with proper shape"
        raise InvalidArgument(message, field=spec.name)
    return tuple(dim if dim >= 0 else rest if axis == free[-1] else 1 for axis, dim in enumerate(dims))
