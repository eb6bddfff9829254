"""Tensors that a config asks for without spelling them out: zeros, random numbers, or what a file beside it holds."""

from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..core.errors import InvalidArgument
from ..core.tensor import MAX_CONFIG_TENSOR_BYTES, NUMPY_TYPES, Tensor, is_config_tensor_size_allowed, zero_array
from .config_io import ConfigMessage, v2_datatype
from .label_files import path_within


class SampleTensor(NamedTuple):
    """A message with `data_type`, `dims` and one of some ways to the data. Errors call it `of`, its place `field`."""

    given: ConfigMessage
    description: str
    field: str

    def tensor(self, name: str, batch: tuple[int, ...], files: Path) -> Tensor:
        """Of shape [*batch, *dims]; its file, if that is the way, is in the directory `files`.

        Raises:
            InvalidArgument: something of it is missing, or the file is not what it should be.
        """
        if any(dim < 0 for dim in self.given.dims):
            message = f"{self.description} must have dims of at least 0, got {list(self.given.dims)}"
            raise InvalidArgument(message, field=f"{self.field}.dims")
        if self.given.data_type == 0:
            raise InvalidArgument(f"{self.description} must specify 'data_type'", field=f"{self.field}.data_type")
        datatype, shape = v2_datatype(self.given), (*batch, *self.given.dims)
        if not is_config_tensor_size_allowed(datatype, shape):
            limits = f"at most 64 dimensions and {MAX_CONFIG_TENSOR_BYTES} bytes"
            raise InvalidArgument(
                f"{self.description} must have {limits}, got shape {list(shape)}", field=f"{self.field}.dims"
            )
        return Tensor(name, datatype, shape, self._data(datatype, shape, files))

    def _data(self, datatype: str, shape: tuple[int, ...], files: Path) -> NDArray[Any]:
        [ways] = self.given.DESCRIPTOR.oneofs
        match self.given.WhichOneof(ways.name):
            case "zero_data":
                return _zero_data(datatype, shape)
            case "random_data":
                return _random_data(datatype, shape)
            case "data_file" | "input_data_file" as way:
                file = path_within(files.parent, f"{files.name}/{getattr(self.given, way)}")
                return _file_data(datatype, shape, file, self.description)
        *others, last = (way.name for way in ways.fields)
        raise InvalidArgument(f"{self.description} must have one of {', '.join(others)} and {last}", field=self.field)


def _zero_data(datatype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    return zero_array(shape, np.dtype(NUMPY_TYPES[datatype]))


def _random_data(datatype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Of strings, empty ones, as Triton has it; of floats numbers from 0 to 1, of integers small ones."""
    generator = np.random.default_rng(0)
    dtype = np.dtype(NUMPY_TYPES[datatype])
    if datatype == "BYTES":
        return _zero_data(datatype, shape)
    if datatype == "BF16":
        return (generator.random(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype.kind == "f":
        return generator.random(shape).astype(dtype)
    return generator.integers(0, 2 if datatype == "BOOL" else 100, shape).astype(dtype)


def _file_data(datatype: str, shape: tuple[int, ...], file: Path, of: str) -> NDArray[Any]:
    """Raw elements in the machine's order; of strings each after its length in 4 bytes."""
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise InvalidArgument(f"{of}: cannot read {file}: {error.strerror}") from None
    if datatype == "BYTES":
        return _strings(raw, shape, f"{of}: {file}")
    dtype = np.dtype(NUMPY_TYPES[datatype])
    wanted = prod(shape) * dtype.itemsize
    if len(raw) != wanted:
        raise InvalidArgument(f"{of}: {file} has {len(raw)} bytes, not {wanted}")
    return np.frombuffer(raw, dtype).reshape(shape)


def _strings(raw: bytes, shape: tuple[int, ...], of: str) -> NDArray[Any]:
    found, position = [], 0
    while position + 4 <= len(raw):
        end = position + 4 + int.from_bytes(raw[position : position + 4], "little")
        found.append(raw[position + 4 : end])
        position = end
    if position != len(raw) or len(found) != prod(shape):
        raise InvalidArgument(f"{of} does not hold {prod(shape)} strings, each after its length")
    strings = np.empty(len(found), np.object_)
    strings[:] = found
    return strings.reshape(shape)
