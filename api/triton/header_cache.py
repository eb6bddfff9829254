"""Binary requests that look alike: clients send the same JSON in front of other numbers, time and again.

Knows what a header said when it was read; not how to read one.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, Self

import msgspec
import numpy as np

from ...core.request import InferRequest
from ...core.tensor import NUMPY_TYPES, Tensor
from ..json_values import JsonObject
from .infer_call import HttpInferRequest

_KNOWN = 256
_LONGEST = 4096
"""Headers that are remembered: how many, and up to how many bytes."""

_DTYPES = {name: np.dtype(dtype) for name, dtype in NUMPY_TYPES.items() if name not in ("BYTES", "BOOL")}
"""Of tensors that are as long as their shapes say, and views of the body."""


class _Slot(NamedTuple):
    """Where a tensor lies: elements, and bytes behind the header."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    dtype: "np.dtype[Any]"
    elements: int
    offset: int


class CachedHeader(NamedTuple):
    """All of a request but its numbers: `size` bytes of them."""

    slots: tuple[_Slot, ...]
    size: int
    call: HttpInferRequest

    @classmethod
    def from_request(cls, call: HttpInferRequest, size: int) -> Self:
        return cls(tuple(_slots(call.request.inputs)), size, call._replace(request=_without_inputs(call.request)))

    def fill(self, body: bytes, begin: int) -> HttpInferRequest:
        """With the numbers of this body, whose header ends at `begin`."""
        asked, inputs = self.call.request, {}
        for name, datatype, shape, dtype, elements, offset in self.slots:
            inputs[name] = Tensor(name, datatype, shape, np.frombuffer(body, dtype, elements, begin + offset))
        request = InferRequest(asked.id, inputs, asked.outputs, asked.parameters)
        return HttpInferRequest(request, self.call.outputs, self.call.default_output)


def _slots(inputs: Mapping[str, Tensor]) -> Iterator[_Slot]:
    offset = 0
    for tensor in inputs.values():
        dtype = _DTYPES[tensor.datatype]
        yield _Slot(tensor.name, tensor.datatype, tensor.shape, dtype, tensor.data.size, offset)
        offset += tensor.data.nbytes


def _without_inputs(request: InferRequest) -> InferRequest:
    return msgspec.structs.replace(request, inputs={})


class HeaderCache:
    """Of the headers that came lately, by model and header."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, bytes], CachedHeader] = {}

    def find(self, model: str, body: bytes | bytearray, length: int) -> HttpInferRequest | None:
        """What this body asks, if such a one was understood before; its header has that length."""
        if length > _LONGEST or type(body) is not bytes:
            return None
        outline = self._known.get((model, body[:length]))
        if outline is None or len(body) - length != outline.size:
            return None
        return outline.fill(body, length)

    def remember(
        self, model: str, body: bytes | bytearray, length: int, document: JsonObject, call: HttpInferRequest
    ) -> None:
        """This body was read: what its header said, and what came of it."""
        if length > _LONGEST or not _lasting(document, call):
            return
        if len(self._known) >= _KNOWN:
            del self._known[next(iter(self._known))]
        self._known[model, bytes(body[:length])] = CachedHeader.from_request(call, len(body) - length)


def _lasting(document: JsonObject, call: HttpInferRequest) -> bool:
    """The header says all but numbers that lie behind it, and names nothing that comes and goes."""
    if call.request.id or any(wanted.memory is not None for wanted in call.outputs.values()):
        return False
    inputs = call.request.inputs
    raw = all("binary_data_size" in each.get("parameters", ()) for each in document["inputs"])
    return raw and all(tensor.datatype in _DTYPES and tensor.data.size for tensor in inputs.values())
