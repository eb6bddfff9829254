"""Tensors in messages between processes."""

from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from ..core.tensor import NUMPY_TYPES, Tensor

_DTYPES = {name: np.dtype(dtype) for name, dtype in NUMPY_TYPES.items() if name != "BYTES"}
_BYTES = np.dtype(np.uint8)


class TensorMessage(msgspec.Struct, array_like=True, frozen=True):
    """A `Tensor`: its elements as `data`, or those of BYTES as `strings`."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    data: memoryview | None
    strings: list[bytes] = []

    @classmethod
    def of(cls, tensor: Tensor) -> "TensorMessage":
        data = tensor.data
        if tensor.datatype == "BYTES" and data.dtype.hasobject:
            return cls(tensor.name, tensor.datatype, tensor.shape, None, data.ravel().tolist())
        if not data.flags.c_contiguous:
            data = np.ascontiguousarray(data)
        return cls(tensor.name, tensor.datatype, tensor.shape, data.data)

    def tensor(self) -> Tensor:
        """Numbers are a view of the message."""
        if self.data is None:
            strings: NDArray[Any] = np.empty(len(self.strings), np.object_)
            strings[:] = self.strings
            return Tensor(self.name, self.datatype, self.shape, strings)
        # The data of an unknown datatype stay bytes: no model has such a tensor.
        data = np.frombuffer(self.data, _DTYPES.get(self.datatype, _BYTES))
        if data.flags.writeable:
            data.flags.writeable = False
        return Tensor(self.name, self.datatype, self.shape, data)
