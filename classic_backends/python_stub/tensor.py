"""The API's tensors and datatypes, and how tensors cross to the server and back."""

from __future__ import annotations

import struct
from typing import Any, Iterable

import numpy as np

from . import dlpack
from .connection import TritonModelException, server
from .messages import TensorMessage
from .tensor_memory import NUMPY_TYPES, V2_NAMES

_NUMBERS = {name: number for number, name in enumerate(NUMPY_TYPES, 1)}
"""Triton's numbers of datatypes; 0 is no type."""


TRITON_STRING_TO_NUMPY: dict[str, Any] = {
    "TYPE_STRING" if name == "BYTES" else f"TYPE_{name}": bool if name == "BOOL" else dtype.type
    for name, dtype in NUMPY_TYPES.items()
    if name != "BF16"
}


class Tensor:
    """A named tensor. The constructor takes a numpy array: of `bytes` or text as objects for BYTES. One that
    `from_dlpack` made of a GPU's memory stays there; it is copied to the host when it is sent."""

    _on_gpu: dlpack.ImportedTensor | None = None

    def __init__(self, name: str, numpy_array: np.ndarray[Any, Any]) -> None:
        if not isinstance(name, str) or numpy_array is None:
            raise TypeError("a Tensor is made of a name, which is a str, and an array")
        array = np.asarray(numpy_array)
        if array.dtype.kind in "SU":
            array = array.astype(np.object_)
        datatype = V2_NAMES.get(array.dtype)
        if datatype is None:
            raise TritonModelException(f"Tensor '{name}' has the type {array.dtype}, for which Triton has none.")
        if datatype == "BYTES":
            array = _to_bytes_objects(array)
        self._set(name, datatype, np.require(array, requirements="C"))

    def _set(self, name: str, datatype: str, array: np.ndarray[Any, Any]) -> Tensor:
        self._name = name
        self._datatype = datatype
        self._array = array
        return self

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray[Any, Any]:
        """The array, without a copy."""
        if self._on_gpu is not None:
            raise TritonModelException("Tensor is stored in GPU and cannot be converted to NumPy.")
        if self._datatype == "BF16":
            raise TritonModelException("Tensor of type BF16 cannot be converted to NumPy; use DLPack.")
        return self._array

    def triton_dtype(self) -> int:
        return _NUMBERS[self._datatype]

    def shape(self) -> list[int]:
        return list(self._array.shape if self._on_gpu is None else self._on_gpu.shape)

    def is_cpu(self) -> bool:
        return self._on_gpu is None

    def to_dlpack(self) -> Any:
        """A capsule of the tensor's memory, without a copy."""
        if self._datatype == "BYTES":
            raise TritonModelException("DLPack does not have support for string tensors.")
        if self._on_gpu is not None:
            return self._on_gpu.to_capsule()
        return dlpack.to_capsule(self._array, self._datatype == "BF16")

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CPU, 0) if self._on_gpu is None else self._on_gpu.device

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor over another library's memory, the host's or a GPU's, without a copy."""
        if not name:
            raise TritonModelException("Tensor name should not be empty.")
        if tensor is None:
            raise TritonModelException(f"Tensor '{name}' cannot be made of None.")
        try:
            imported = dlpack.from_dlpack(tensor)
        except ValueError as error:
            raise TritonModelException(str(error)) from None
        datatype = "BF16" if imported.bfloat16 else V2_NAMES.get(imported.dtype)
        if datatype is None:
            raise TritonModelException(f"Tensor '{name}' has the type {imported.dtype}, for which Triton has none.")
        view = Tensor.__new__(Tensor)
        if imported.on_gpu:
            view._name = name
            view._datatype = datatype
            view._on_gpu = imported
            return view
        return view._set(name, datatype, imported.as_array())

    def _on_host(self) -> np.ndarray[Any, Any]:
        return self._array if self._on_gpu is None else self._on_gpu.as_array()


def byte_size(array: np.ndarray[Any, Any]) -> int:
    """The size of an array's elements; objects are `bytes`."""
    return sum(map(len, array.ravel())) if array.dtype.hasobject else array.nbytes


def received_tensor(message: TensorMessage) -> Tensor:
    """A tensor over the memory that the server has written."""
    return Tensor.__new__(Tensor)._set(message.name, message.datatype, server().reader.read(message))


def write_tensors(tensors: Iterable[Tensor]) -> list[TensorMessage]:
    server().require_own_process()
    try:
        return server().writer.write_all((tensor._name, tensor._datatype, tensor._on_host()) for tensor in tensors)
    except (MemoryError, ValueError) as error:
        raise TritonModelException(str(error)) from None


def _to_bytes_objects(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    items = array.ravel().tolist()
    if all(type(item) is bytes for item in items):
        return array
    objects = np.empty(len(items), np.object_)
    objects[:] = [item if isinstance(item, bytes) else str(item).encode() for item in items]
    return objects.reshape(array.shape)


def triton_to_numpy_type(data_type: int) -> Any:
    return NUMPY_TYPES[next(name for name, number in _NUMBERS.items() if number == data_type)].type


def numpy_to_triton_type(data_type: Any) -> int:
    dtype = np.dtype(data_type)
    return _NUMBERS["BYTES" if dtype.hasobject or dtype.kind == "S" else V2_NAMES[dtype]]


def triton_string_to_numpy(triton_type_string: str) -> Any:
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def serialize_byte_tensor(input_tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The elements in row-major order, each behind its length of four bytes; as an array of one object."""
    if input_tensor.size == 0:
        return np.empty([0], dtype=np.object_)
    if not (input_tensor.dtype.hasobject or input_tensor.dtype.kind == "S"):
        raise TritonModelException("cannot serialize bytes tensor: invalid datatype")
    items = _to_bytes_objects(input_tensor).ravel().tolist()
    serialized = b"".join(struct.pack("<I", len(item)) + item for item in items)
    return np.asarray(serialized, dtype=np.object_)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> np.ndarray[Any, Any]:
    """The elements of what `serialize_byte_tensor` made, as a flat array of objects."""
    items = []
    offset = 0
    while offset < len(encoded_tensor):
        [length] = struct.unpack_from("<I", encoded_tensor, offset)
        offset += 4 + length
        items.append(bytes(encoded_tensor[offset - length : offset]))
    return np.array(items, dtype=np.object_)
