"""Tensors as raw bytes: little-endian and row-major, each BYTES element behind its length in 4 bytes.

The format of KServe's binary tensor data extension, with Triton's error texts:
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_binary_data.md.
"""

import math
import struct
from collections.abc import Iterable
from typing import Any, TypeAlias

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..core.errors import InvalidArgument, request_id_prefix
from ..core.tensor import NUMPY_TYPES, Tensor

RawBytes: TypeAlias = bytes | bytearray | memoryview
"""The bytes of a tensor. They are not copied: a tensor of numbers is a view of them."""

_DTYPES = {datatype: np.dtype(dtype) for datatype, dtype in NUMPY_TYPES.items()}
_LENGTH = struct.Struct("<I")
_MOST_ELEMENTS = 2**63 - 1
_MOST_SAFE_ELEMENTS = _MOST_ELEMENTS // 8
"""The most elements of any datatype whose size in bytes 63 bits can hold."""

_PIECE = 1 << 14
"""Strings that are handled at a time: the interpreter's lock is kept for as long as that takes."""

LONG_ELEMENTS = 1 << 14
_LONG_STRING_BYTES = 1 << 18
"""Elements of a tensor, and bytes of its strings, beyond which it is long."""

_COPIED_BYTES = 1 << 16

_MOST_DIMENSIONS = 64
"""Dimensions that an array of numpy may have."""


class DeclaredInput(msgspec.Struct, frozen=True):
    """An input as its request declares it, before there are data."""

    request_id: str
    model: str
    name: str
    datatype: str
    shape: tuple[int, ...]

    def error(self, text: str) -> InvalidArgument:
        return InvalidArgument(f"{request_id_prefix(self.request_id)}{text}", field=self.name)

    @property
    def description(self) -> str:
        return f"input '{self.name}' for model '{self.model}'"

    def tensor(self, data: NDArray[Any]) -> Tensor:
        return Tensor(self.name, self.datatype, self.shape, data)


def element_count(declared: DeclaredInput) -> int:
    """The number of elements of an input; raises `InvalidArgument` if no tensor can have its shape."""
    name = declared.name
    datatype = declared.datatype
    shape = declared.shape
    if len(shape) > _MOST_DIMENSIONS:
        text = f"{len(shape)} dimensions are more than the {_MOST_DIMENSIONS} that a tensor may have"
        raise InvalidArgument(f"invalid shape for input '{name}': {text}", field=name)
    count = math.prod(shape)
    if count <= _MOST_SAFE_ELEMENTS and (not shape or min(shape) >= 0):
        return count
    # An unknown datatype counts as 1 byte, as BYTES does, whose elements have a size of their own.
    width = _DTYPES[datatype].itemsize if datatype in NUMPY_TYPES and datatype != "BYTES" else 1
    shown = f"[{','.join(map(str, shape))}]"
    text = f"invalid shape for input '{name}': shape {shown}"
    if min(shape) < 0:
        text += " contains one or more invalid dimensions"
    elif count > _MOST_ELEMENTS:
        text += f" causes total element count to exceed maximum size of {_MOST_ELEMENTS}"
    elif count * width > _MOST_ELEMENTS:
        text = f"byte size overflow for input '{name}': shape {shown} exceeds {_MOST_ELEMENTS} bytes"
    else:
        return count
    raise InvalidArgument(text, field=name)


def decode(declared: DeclaredInput, raw: RawBytes) -> Tensor:
    """The tensor that the bytes hold: a read-only view of them, or new objects for BYTES.

    The data of an unknown datatype stay bytes, as no model has such an input. Raises `InvalidArgument` for more or
    fewer bytes than the shape needs.
    """
    count, datatype = element_count(declared), declared.datatype
    if datatype == "BYTES":
        return declared.tensor(string_array(declared, _split_strings(declared, bytes(raw), count), count))
    if datatype not in NUMPY_TYPES:
        return declared.tensor(np.frombuffer(raw, np.uint8))
    dtype = _DTYPES[datatype]
    check_byte_size(declared, count * dtype.itemsize, len(raw))
    if datatype == "BOOL":  # a byte may say true in 255 ways
        return declared.tensor(np.not_equal(np.frombuffer(raw, np.uint8), 0))
    data = np.frombuffer(raw, dtype)
    if type(raw) is not bytes:
        data.flags.writeable = False
    return declared.tensor(data)


def _split_strings(declared: DeclaredInput, raw: bytes, count: int) -> list[bytes]:
    """The elements of a BYTES tensor, at most one more than `count`."""
    elements: list[bytes] = []
    offset, unpack = 0, _LENGTH.unpack_from
    while offset < len(raw) and len(elements) <= count:
        begin = offset + 4
        if begin > len(raw):
            raise declared.error(
                f"incomplete string length indicator for inference {declared.description}, "
                f"expecting {_LENGTH.size} bytes but only {len(raw) - offset} bytes available. "
                "Please make sure the string length indicator is in one buffer."
            )
        offset = begin + unpack(raw, offset)[0]
        if offset > len(raw):
            whose = f"inference {declared.description}"
            raise declared.error(f"incomplete string data for {whose}, the last element is cut off")
        elements.append(raw[begin:offset])
    return elements


def check_raw_length(declared: DeclaredInput, size: int) -> None:
    """Raise `InvalidArgument` if no tensor of this type and shape has so many raw bytes; strings may have any."""
    dtype = _DTYPES.get(declared.datatype)
    if dtype is not None and not dtype.hasobject:
        check_byte_size(declared, element_count(declared) * dtype.itemsize, size)


def check_byte_size(declared: DeclaredInput, expected: int, got: int) -> None:
    """Raise `InvalidArgument` if an input has another size in bytes than its shape needs."""
    if expected != got:
        raise declared.error(f"input byte size mismatch for {declared.description}. Expected {expected}, got {got}")


def check_string_count(declared: DeclaredInput, expected: int, got: int) -> None:
    """Raise `InvalidArgument` if an input has another number of strings than its shape needs."""
    whose = f"inference {declared.description}"
    if got > expected:
        raise declared.error(f"unexpected number of string elements {got} for {whose}, expecting {expected}")
    if got < expected:
        raise declared.error(f"expected {expected} string elements for {whose}, got {got}")


def string_array(declared: DeclaredInput, elements: list[bytes], count: int) -> NDArray[Any]:
    """The data of a BYTES tensor; raises `InvalidArgument` unless it has `count` elements."""
    check_string_count(declared, count, len(elements))
    data = np.empty(len(elements), np.object_)
    for begin in range(0, len(elements), _PIECE):
        data[begin : begin + _PIECE] = elements[begin : begin + _PIECE]
    return data


def byte_size(tensor: Tensor) -> int:
    if tensor.datatype != "BYTES":
        return tensor.data.nbytes
    sizes = [sum(map(len, piece)) for piece in _pieces(tensor)]
    return _LENGTH.size * tensor.data.size + sum(sizes)


def _pieces(tensor: Tensor) -> Iterable[NDArray[Any]]:
    """The tensor's elements, flat, some at a time; most tensors of strings have few."""
    flat = tensor.data.ravel()
    if flat.size <= _PIECE:
        return (flat,)
    return (flat[begin : begin + _PIECE] for begin in range(0, flat.size, _PIECE))


def is_long(tensor: Tensor) -> bool:
    """Whether to write the tensor's elements, or its strings, takes longer than the event loop should be held."""
    if tensor.data.size > LONG_ELEMENTS:
        return True
    return tensor.datatype == "BYTES" and byte_size(tensor) > _LONG_STRING_BYTES


def encode_cheaply(tensor: Tensor) -> bytes | memoryview:
    """The tensor's raw bytes; those of a small one are copied, which takes less than a view."""
    return encode(tensor) if tensor.data.nbytes < _COPIED_BYTES else encode_view(tensor)


def encode(tensor: Tensor) -> bytes:
    """The tensor's raw bytes, copied."""
    if tensor.datatype != "BYTES":
        return tensor.data.tobytes()
    return b"".join(
        [b"".join([part for text in piece for part in (_LENGTH.pack(len(text)), text)]) for piece in _pieces(tensor)]
    )


def encode_view(tensor: Tensor) -> memoryview:
    """The tensor's raw bytes; without a copy for contiguous numbers."""
    if tensor.datatype == "BYTES":
        return memoryview(encode(tensor))
    return np.ascontiguousarray(tensor.data).reshape(-1).view(np.uint8).data
