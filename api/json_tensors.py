"""Tensors as JSON: arrays of any nesting become flat numpy arrays of a datatype, and the other way round."""

import json
import math
from array import array
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, TypeAlias

import numpy as np
import orjson
from numpy.typing import NDArray

from ..core.errors import CharoniaError, Internal, InvalidArgument
from ..core.request import ParameterValue
from ..core.tensor import NUMPY_TYPES, Tensor, TensorSpec

Buffer: TypeAlias = bytes | bytearray | memoryview

MAX_ID_LENGTH = 4096
"""The most characters of a request's id."""

JsonObject: TypeAlias = dict[str, Any]


def parse_json(body: Buffer, offset: int = 0) -> Any:
    """The value of a JSON text, in which NaN and infinities may be bare words. Raises `InvalidArgument`. `offset`:
    where the text begins in the body."""
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        try:
            return json.loads(bytes(body).decode())
        except (ValueError, RecursionError) as error:
            raise unreadable_json(error, offset) from None


def parse_json_object(body: Buffer) -> JsonObject:
    """The object that a body is. Raises `InvalidArgument` as `parse_json` does, and for another value."""
    value = parse_json(body)
    if not isinstance(value, dict):
        raise malformed_json("the body must be a JSON object")
    return value


def unreadable_json(error: ValueError | RecursionError, offset: int = 0) -> CharoniaError:
    """The error for a body that the standard library's parser cannot read."""
    if isinstance(error, json.JSONDecodeError):
        return malformed_json(error.msg, max(0, offset + error.pos))
    if isinstance(error, UnicodeDecodeError):
        return malformed_json(f"it is not UTF-8: {error.reason}", max(0, offset + error.start))
    if isinstance(error, RecursionError):
        return NestedTooDeeply(max(0, offset))
    return malformed_json("a number has too many digits", max(0, offset))


def malformed_json(reason: str, offset: int = 0) -> CharoniaError:
    return InvalidArgument(_malformed(reason, offset))


def _malformed(reason: str, offset: int) -> str:
    return f"failed to parse the request JSON buffer: {reason} at {offset}"


class NestedTooDeeply(InvalidArgument):
    """A body whose values are nested more deeply than is read."""

    def __init__(self, offset: int) -> None:
        super().__init__(_malformed("it is nested too deeply", offset))


def wrong_json_type(field: str, texts: str) -> CharoniaError:
    return InvalidArgument(f"Unable to parse '{field}': attempt to access JSON {texts}", field=field)


def required_member(of: JsonObject, key: str) -> Any:
    """Raises `InvalidArgument` where the member is missing."""
    if key not in of:
        message = f"Unable to parse '{key}': attempt to access non-existing object member '{key}'"
        raise InvalidArgument(message, field=key)
    return of[key]


def as_string(field: str, value: Any) -> str:
    """Raises `InvalidArgument` for a value of another type, as all functions below do."""
    if not isinstance(value, str):
        raise wrong_json_type(field, "non-string as string")
    try:
        if not value.isascii():
            value.encode()
    except UnicodeEncodeError:
        raise InvalidArgument(f"Unable to parse '{field}': a lone surrogate is not text", field=field) from None
    return value


def as_request_id(value: Any) -> str:
    """The id of a request, bounded as it goes into responses, records and traces."""
    if isinstance(value, str) and len(value) > MAX_ID_LENGTH:
        raise InvalidArgument(
            f"'id' has {len(value)} characters, more than the {MAX_ID_LENGTH} there may be", field="id"
        )
    return as_string("id", value)


def as_boolean(field: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise wrong_json_type(field, "non-boolean as boolean")
    return value


def as_unsigned(field: str, value: Any) -> int:
    if type(value) is not int or not 0 <= value < 2**64:
        raise wrong_json_type(field, "non-unsigned-integer as unsigned-integer")
    return value


def as_signed(field: str, value: Any) -> int:
    if type(value) is not int or not -(2**63) <= value < 2**63:
        raise wrong_json_type(field, "non-signed-integer as signed-integer")
    return value


def as_array(field: str, value: Any) -> list[Any]:
    if type(value) is not list:
        raise wrong_json_type(field, "non-array as array")
    return value


def as_object(field: str, value: Any) -> JsonObject:
    if type(value) is not dict:
        raise wrong_json_type(field, "non-object as object")
    return value


def as_parameter(key: str, value: Any) -> ParameterValue:
    """The value of a request parameter: text, number or boolean."""
    if isinstance(value, str):
        return as_string(key, value)
    if isinstance(value, bool | float) or (isinstance(value, int) and -(2**63) <= value < 2**64):
        return value
    if isinstance(value, int):
        raise InvalidArgument(f"parameter '{key}' must be between -2**63 and 2**64 - 1", field=key)
    message = f"parameter '{key}' has invalid type. It should be either 'int', 'float', 'bool', or 'string'."
    raise InvalidArgument(message, field=key)


PIECE_ELEMENTS = 1 << 14
"""Elements that are encoded at a time."""

_PIECE_CHARACTERS = 1 << 18
_DEEPEST = 100
_BINARY_ONLY = ("FP16", "BF16")
_FLOATS = ("FP32", "FP64")
_TEXTS = {"BOOL": "non-boolean as boolean", "BYTES": "non-string as string"} | dict.fromkeys(
    _FLOATS, "non-number as double"
)
_ITEM_SIZES = {name: np.dtype(kind).itemsize for name, kind in NUMPY_TYPES.items()}
JSON_DATATYPES = frozenset(NUMPY_TYPES) - {*_BINARY_ONLY}
"""Datatypes whose elements can be JSON."""

_KINDS: dict[str, set[type]] = {"BOOL": {bool}, "BYTES": {str}, "FP32": {int, float}, "FP64": {int, float}}


def flatten(values: list[Any]) -> list[Any]:
    """The elements of nested arrays, in their order; raises `InvalidArgument` for arrays that are nested too deeply."""
    depth = 1
    while list in (kinds := set(map(type, values))):
        if len(kinds) > 1:
            elements: list[Any] = []
            _gather(values, elements, depth)
            return elements
        values, depth = list(chain.from_iterable(values)), depth + 1
        _check_depth(depth)
    return values


def _check_depth(depth: int) -> None:
    if depth >= _DEEPEST:
        raise InvalidArgument(f"JSON nesting depth exceeds maximum allowed limit ({_DEEPEST})", field="data")


def _gather(values: list[Any], elements: list[Any], depth: int) -> None:
    _check_depth(depth)
    if list not in set(map(type, values)):
        elements.extend(values)
        return
    for value in values:
        if type(value) is list:
            _gather(value, elements, depth + 1)
        else:
            elements.append(value)


def refuse_binary_only(datatype: str, name: str) -> None:
    """Raises `InvalidArgument` for an input of a datatype that JSON has no numbers for."""
    if datatype in _BINARY_ONLY:
        raise InvalidArgument(
            f"receiving {datatype} data via JSON is not supported. Please use the binary data format for input {name}",
            field=name,
        )


def to_array(datatype: str, values: list[Any], field: str) -> NDArray[Any]:
    """A flat array of JSON values; raises `InvalidArgument`, which names `field`, for one that has no place in it."""
    if not set(map(type, values)) <= _KINDS.get(datatype, {int}):
        raise _mismatch(datatype, field)
    try:
        if datatype == "BYTES":
            data = np.empty(len(values), np.object_)
            data[:] = [value.encode() for value in values]
            return data
        if datatype == "FP32":  # a double too large for it becomes infinity, of which numpy would warn
            return np.asarray(array("f", values))
        return np.array(values, NUMPY_TYPES[datatype])
    except OverflowError:
        raise _mismatch(datatype, field) from None
    except UnicodeEncodeError:
        raise InvalidArgument(f"Unable to parse '{field}': a lone surrogate is not text", field=field) from None


def _mismatch(datatype: str, field: str) -> CharoniaError:
    sign = "unsigned" if datatype[0] == "U" else "signed"
    return wrong_json_type(field, _TEXTS.get(datatype, f"non-{sign}-integer as {sign}-integer"))


def input_tensor(spec: TensorSpec, value: Any, batched: bool) -> Tensor:
    """The input that a value of a JSON body is; its innermost free dimension takes what the
    fixed ones leave, other free ones are 1. Raises `InvalidArgument`, whose `field` is the input's name, for a value of
    another type or size."""
    refuse_binary_only(spec.datatype, spec.name)
    if isinstance(value, np.ndarray):
        data = value
    else:
        data = to_array(spec.datatype, value if type(value) is list else [value], spec.name)
    dims = (-1, *spec.dims) if batched else spec.dims
    free = [axis for axis, dim in enumerate(dims) if dim < 0]
    fixed = math.prod(dim for dim in dims if dim >= 0)
    rest, odd = divmod(len(data), fixed) if fixed else (0, len(data))
    if odd or (not free and rest != 1):
        message = f"The schema can not convert input '{spec.name}' to tensor with proper shape"
        raise InvalidArgument(message, field=spec.name)
    shape = tuple(dim if dim >= 0 else rest if axis == free[-1] else 1 for axis, dim in enumerate(dims))
    return Tensor(spec.name, spec.datatype, shape, data.reshape(shape))


def check_element_count(datatype: str, expected: int, got: int) -> None:
    """Raises `Internal`, as Triton does, if the numbers of elements differ."""
    if got > expected:
        first = "shape" if datatype == "BYTES" else "Shape"
        raise Internal(f"Unable to parse 'data': {first} does not match true shape of 'data' field", field="data")
    if got < expected:
        raise Internal("Failed to parse 'data' field: shape does not match true shape", field="data")


def to_list(tensor: Tensor) -> list[Any]:
    """The tensor's elements, flat, as JSON values; raises `InvalidArgument` if JSON has no numbers for the datatype, or
    strings are not UTF-8."""
    if tensor.datatype in _BINARY_ONLY:
        raise InvalidArgument(
            f"sending {tensor.datatype} data via JSON is not supported. "
            f"Please use the binary data format for output {tensor.name}",
            field=tensor.name,
        )
    values: list[Any] = tensor.data.ravel().tolist()
    return _decode_strings(tensor, values) if tensor.datatype == "BYTES" else values


def _decode_strings(tensor: Tensor, values: Iterable[bytes]) -> list[str]:
    try:
        return [value.decode() for value in values]
    except UnicodeDecodeError as error:
        raise InvalidArgument(
            f"sending BYTES data via JSON is not supported where they are not UTF-8 ({error.reason}). "
            f"Please use the binary data format for output {tensor.name}",
            field=tensor.name,
        ) from None


def encode_in_pieces(tensor: Tensor, strict: bool) -> Iterator[bytes]:
    """The JSON of the elements without its brackets, some elements at a time, and of long strings some characters."""
    flat_data, between = tensor.data.ravel(), b""
    if tensor.datatype == "BYTES" and flat_data.size <= PIECE_ELEMENTS:
        for value in flat_data:
            yield between + b'"'
            [text] = _decode_strings(tensor, [value])
            for begin in range(0, len(text), _PIECE_CHARACTERS):
                yield orjson.dumps(text[begin : begin + _PIECE_CHARACTERS])[1:-1]
            yield b'"'
            between = b","
        return
    for begin in range(0, flat_data.size, PIECE_ELEMENTS):
        piece = flat_data[begin : begin + PIECE_ELEMENTS]
        part = Tensor(tensor.name, tensor.datatype, piece.shape, piece)
        yield between + dump_json(to_list(part), strict)[1:-1]
        between = b","


def is_strict_json(tensor: Tensor, values: list[Any] | None = None) -> bool:
    """Whether strict JSON has all its elements: it has no NaN and no infinity. `values`: them as a list, if there is
    one, which is faster for a few: their sum is finite only if all of them are."""
    if tensor.datatype not in _FLOATS or (values is not None and math.isfinite(sum(values))):
        return True
    return bool(np.isfinite(tensor.data).all())


def dump_json(value: Any, strict: bool, ordered: bool = False) -> bytes:
    """The value as JSON, keys `ordered` by name if asked for; where it is not `strict`, NaN and infinities are the bare
    words that Triton writes."""
    if strict:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if ordered else None)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=ordered).encode()


def byte_size(datatype: str, count: int) -> int:
    """The bytes of a tensor of so many elements; of BYTES, only those of the lengths."""
    return count * (4 if datatype == "BYTES" else _ITEM_SIZES.get(datatype, 1))
