"""What stands around the tensors of v2 requests, remembered: one that is alike but for its numbers is not parsed again.

The endpoints that read such requests keep it, by keys of their own.
"""

from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np

from ..core.request import InferRequest
from ..core.tensor import NUMPY_TYPES, Tensor
from .infer_call import InferCall

Key = TypeVar("Key")
Value = TypeVar("Value")

_MAX_OUTLINES = 256
LONGEST_OUTLINE = 4096
"""Bytes of a request beside its tensors, beyond which it is not remembered."""

OUTLINE_DTYPES = {name: np.dtype(dtype) for name, dtype in NUMPY_TYPES.items() if name not in ("BYTES", "BOOL")}
"""The datatypes whose tensors are as long as their shapes say, and views of the body."""


class _TensorPlace(NamedTuple):
    """A tensor of the body, the bytes between the outline and it, and the last of them, which are no tensor's."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"
    offset: int
    mark: bytes


class RequestOutline(msgspec.Struct, frozen=True):
    """A request without its tensors, which are in the `size` bytes behind the outline."""

    tensors: tuple[_TensorPlace, ...]
    size: int
    call: InferCall

    def fill(self, body: bytes, begin: int) -> InferCall | None:
        """The request of a body with this outline, which ends at `begin`; None if it has other tensors."""
        if len(body) - begin != self.size:
            return None
        inputs = {}
        for name, datatype, shape, dtype, offset, mark in self.tensors:
            at = begin + offset
            if mark and not body.startswith(mark, at - len(mark)):
                return None
            inputs[name] = Tensor(name, datatype, shape, np.ndarray(shape, dtype, body, at))
        return self.with_inputs(inputs)

    def with_inputs(self, inputs: dict[str, Tensor]) -> InferCall:
        """The request of a body with this outline whose tensors are these."""
        request = self.call.request
        filled = InferRequest("", inputs, request.outputs, request.parameters)
        return InferCall(filled, self.call.outputs, self.call.default_output)


def outline_of(call: InferCall, marks: tuple[bytes, ...] = ()) -> RequestOutline | None:
    """The outline of a request whose tensors follow one another in its body, with a mark in front of each but the
    first. None for one that has an id, no tensors, memory of its client, or tensors that are not numbers."""
    request = call.request
    inputs = request.inputs.values()
    if (
        request.id
        or not inputs
        or call.deferred
        or any(output.memory is not None for output in call.outputs.values())
        or any(tensor.datatype not in OUTLINE_DTYPES or not tensor.data.size for tensor in inputs)
    ):
        return None
    tensors, offset = [], 0
    for tensor, mark in zip(inputs, (b"", *(marks or (b"",) * (len(inputs) - 1))), strict=True):
        offset += len(mark)
        dtype = OUTLINE_DTYPES[tensor.datatype]
        tensors.append(_TensorPlace(tensor.name, tensor.datatype, tensor.shape, dtype, offset, mark))
        offset += tensor.data.nbytes
    bare = msgspec.structs.replace(request, inputs={})
    return RequestOutline(tuple(tensors), offset, msgspec.structs.replace(call, request=bare))


def keep_latest(kept: dict[Key, Value], key: Key, value: Value) -> None:
    """Add what an outline is known by, or the outline; the oldest goes where there are too many."""
    if len(kept) >= _MAX_OUTLINES and key not in kept:
        del kept[next(iter(kept))]
    kept[key] = value
