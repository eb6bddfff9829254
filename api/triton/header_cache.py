"""The parsed JSON headers of binary requests: clients send the same one in front of other numbers, time and again.

Knows what a header meant when it was parsed; not how to parse one.
"""

from typing import Any, NamedTuple

import msgspec
import numpy as np

from ...core.request import InferRequest
from ...core.tensor import NUMPY_TYPES, Tensor
from ..infer_call import InferCall
from ..json_values import JsonObject

_MAX_HEADERS = 256
_LONGEST_HEADER = 4096

_DTYPES = {name: np.dtype(dtype) for name, dtype in NUMPY_TYPES.items() if name not in ("BYTES", "BOOL")}
"""The datatypes whose tensors are as long as their shapes say, and views of the body."""


class _TensorPlace(NamedTuple):
    """A tensor of the body: its elements, and the bytes between the header and it."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"
    elements: int
    offset: int


class _CachedHeader(NamedTuple):
    """A request without its tensors, which are `size` bytes behind the header."""

    tensors: tuple[_TensorPlace, ...]
    size: int
    call: InferCall


class HeaderCache:
    """The latest headers, by model and text."""

    def __init__(self) -> None:
        self._headers: dict[tuple[str, bytes], _CachedHeader] = {}

    def __len__(self) -> int:
        return len(self._headers)

    def find(self, model: str, body: bytes | bytearray, length: int) -> InferCall | None:
        """The request that this body is, if one with the same header, `length` bytes long, was remembered."""
        if length > _LONGEST_HEADER or type(body) is not bytes:
            return None
        header = self._headers.get((model, body[:length]))
        if header is None or len(body) - length != header.size:
            return None
        request, inputs = header.call.request, {}
        for name, datatype, shape, dtype, elements, offset in header.tensors:
            inputs[name] = Tensor(name, datatype, shape, np.frombuffer(body, dtype, elements, length + offset))
        filled = InferRequest(request.id, inputs, request.outputs, request.parameters)
        return InferCall(filled, header.call.outputs, header.call.default_output)

    def remember(self, model: str, body: bytes | bytearray, length: int, document: JsonObject, call: InferCall) -> None:
        """Keep the header of a body that was parsed: `document` is its JSON, `call` the request.

        Only one that says all but numbers that lie behind it, and names no id and no shared memory.
        """
        inputs = call.request.inputs.values()
        if (
            length > _LONGEST_HEADER
            or call.request.id
            or any(output.memory is not None for output in call.outputs.values())
            or any("binary_data_size" not in each.get("parameters", ()) for each in document["inputs"])
            or any(tensor.datatype not in _DTYPES or not tensor.data.size for tensor in inputs)
        ):
            return
        if len(self._headers) >= _MAX_HEADERS:
            del self._headers[next(iter(self._headers))]
        tensors, offset = [], 0
        for tensor in inputs:
            dtype, elements = _DTYPES[tensor.datatype], tensor.data.size
            tensors.append(_TensorPlace(tensor.name, tensor.datatype, tensor.shape, dtype, elements, offset))
            offset += tensor.data.nbytes
        bare = call._replace(request=msgspec.structs.replace(call.request, inputs={}))
        self._headers[model, bytes(body[:length])] = _CachedHeader(tuple(tensors), len(body) - length, bare)
