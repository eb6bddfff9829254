"""Tensors as the KServe v2 protocol names and types them."""

import math
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
from numpy.typing import DTypeLike, NDArray

NUMPY_TYPES: dict[str, DTypeLike] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "BF16": np.uint16,
    "FP32": np.float32,
    "FP64": np.float64,
    "BYTES": np.object_,
}
"""v2 datatype to numpy dtype. BF16, which numpy lacks, is its bits; BYTES elements are `bytes`."""


MAX_CONFIG_TENSOR_BYTES = 2**31 - 1
"""The largest tensor that a config may declare by its shape alone: no gRPC message carries more."""


def is_config_tensor_size_allowed(datatype: str, shape: tuple[int, ...]) -> bool:
    """Whether a config may declare this tensor, which a few digits can make arbitrarily large."""
    return len(shape) <= 64 and math.prod(shape) * np.dtype(NUMPY_TYPES[datatype]).itemsize <= MAX_CONFIG_TENSOR_BYTES


def zero_array(shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    return np.full(shape, b"", object) if dtype.hasobject else np.zeros(shape, dtype)


class Tensor(msgspec.Struct, frozen=True):
    """A named array. `data` has the numpy dtype of `datatype` and any shape of `shape`'s size."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: NDArray[Any]

    @classmethod
    def from_values(cls, name: str, datatype: str, values: Any) -> "Tensor":
        """Build from nested Python values or an array; the shape is theirs."""
        data = np.asarray(values, dtype=NUMPY_TYPES[datatype])
        return cls(name, datatype, data.shape, data)

    @property
    def scalar(self) -> Any:
        """The only element, as a Python value. Raises `ValueError` for another size."""
        return self.data.item()


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The declaration of an input or output of a model; -1 in `dims` is a free dimension."""

    name: str
    datatype: str
    dims: tuple[int, ...]
    optional: bool = False
