"""Data that a config asks for without spelling it out: zeros, random numbers, or what a file beside it holds."""

from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..core.errors import InvalidArgument
from ..core.tensor import NUMPY_TYPES, blank


def zeros(datatype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    return blank(shape, np.dtype(NUMPY_TYPES[datatype]))


def random(datatype: str, shape: tuple[int, ...]) -> NDArray[Any]:
    """Of strings, empty ones, as Triton has it; of floats numbers from 0 to 1, of integers small ones."""
    generator = np.random.default_rng(0)
    dtype = np.dtype(NUMPY_TYPES[datatype])
    if datatype == "BYTES":
        return zeros(datatype, shape)
    if datatype == "BF16":
        return (generator.random(shape, np.float32).view(np.uint32) >> 16).astype(np.uint16)
    if dtype.kind == "f":
        return generator.random(shape).astype(dtype)
    return generator.integers(0, 2 if datatype == "BOOL" else 100, shape).astype(dtype)


def from_file(datatype: str, shape: tuple[int, ...], file: Path, of: str) -> NDArray[Any]:
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
