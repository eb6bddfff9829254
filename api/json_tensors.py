"""Tensors as JSON: arrays of any nesting become flat numpy arrays of a datatype, and the other way round."""

import json
import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from ..core.errors import CharoniaError, Internal, InvalidArgument
from ..core.tensor import NUMPY_TYPES, Tensor, TensorSpec
from .json_values import wrong_json_type

PIECE_ELEMENTS = 1 << 14
"""Elements that are encoded at a time."""

_DEEPEST = 100
_BINARY_ONLY = ("FP16", "BF16")
_FLOATS = ("FP32", "FP64")
_TEXTS = {"BOOL": "non-boolean as boolean", "BYTES": "non-string as string"} | dict.fromkeys(
    _FLOATS, "non-number as double"
)
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
        with np.errstate(over="ignore"):  # a double too large for FP32 becomes infinity
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
    """The tensor's elements, flat, as JSON values; raises `InvalidArgument` if JSON has no numbers for the datatype."""
    if tensor.datatype in _BINARY_ONLY:
        raise InvalidArgument(
            f"sending {tensor.datatype} data via JSON is not supported. "
            f"Please use the binary data format for output {tensor.name}",
            field=tensor.name,
        )
    values: list[Any] = tensor.data.ravel().tolist()
    return [value.decode(errors="replace") for value in values] if tensor.datatype == "BYTES" else values


def encode_in_pieces(tensor: Tensor, strict: bool) -> Iterator[bytes]:
    """The JSON of the elements without its brackets, some elements at a time."""
    flat_data, between = tensor.data.ravel(), b""
    for begin in range(0, flat_data.size, PIECE_ELEMENTS):
        piece = flat_data[begin : begin + PIECE_ELEMENTS]
        part = Tensor(tensor.name, tensor.datatype, piece.shape, piece)
        yield between + dump_json(to_list(part), strict)[1:-1]
        between = b","


def is_strict_json(tensor: Tensor) -> bool:
    """Whether strict JSON has all its elements: it has no NaN and no infinity."""
    return tensor.datatype not in _FLOATS or bool(np.isfinite(tensor.data).all())


def dump_json(value: Any, strict: bool, ordered: bool = False) -> bytes:
    """The value as JSON, keys `ordered` by name if asked for; where it is not `strict`, NaN and infinities are the bare
    words that Triton writes."""
    if strict:
        return orjson.dumps(value, option=orjson.OPT_SORT_KEYS if ordered else None)
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), sort_keys=ordered).encode()


def byte_size(datatype: str, count: int) -> int:
    """The bytes of a tensor of so many elements; of BYTES, only those of the lengths."""
    return count * (4 if datatype == "BYTES" else np.dtype(NUMPY_TYPES.get(datatype, np.uint8)).itemsize)
