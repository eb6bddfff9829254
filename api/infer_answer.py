"""A model's response as v2 has it over HTTP: JSON, with raw tensors behind it where they were asked for.

Knows v2's sections 3.2, 3.3 and 3.7 and nothing of HTTP beyond its body.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ..core.model import ModelConfig
from ..core.request import InferResponse
from ..core.tensor import Tensor
from . import json_tensors, raw
from .classification import classify
from .infer_call import Call
from .outputs import place

_COPIED = 1 << 16
"""Bytes of tensors up to which it is cheaper to join them than to send them apart."""


class Answer(NamedTuple):
    """A body in parts. `header_length`: of the JSON in front, None if there is nothing but JSON."""

    parts: Sequence[bytes | memoryview]
    header_length: int | None

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))


@dataclass(slots=True)
class _Writing:
    """`strict`: the JSON so far has no NaN and no infinity."""

    blobs: list[bytes | memoryview]
    strict: bool = True

    def output(self, tensor: Tensor, binary: bool, memory: memoryview | None) -> dict[str, Any]:
        said: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if memory is not None:
            place(tensor, memory)
        elif binary:
            blob = raw.encode(tensor) if tensor.data.nbytes < _COPIED else raw.view(tensor)
            self.blobs.append(blob)
            said["parameters"] = {"binary_data_size": len(blob)}
        else:
            self.strict = self.strict and json_tensors.finite(tensor)
            said["data"] = json_tensors.listed(tensor)
        return said


def write_answer(config: ModelConfig, call: Call, response: InferResponse) -> Answer:
    """The body that says `response` as `call` wants it.

    Raises:
        CharoniaError: an output cannot be said like that.
    """
    writing, outputs = _Writing([]), []
    for tensor in response.outputs:
        binary, classes, memory = call.wanted.get(tensor.name, call.rest)
        outputs.append(writing.output(classify(config, tensor, classes) if classes else tensor, binary, memory))
    document: dict[str, Any] = {"id": call.request.id} if call.request.id else {}
    document["model_name"], document["model_version"] = config.name, config.version
    if response.parameters:
        document["parameters"] = response.parameters
    document["outputs"] = outputs
    return _answer(json_tensors.dump(document, writing.strict), writing.blobs)


def _answer(head: bytes, blobs: list[bytes | memoryview]) -> Answer:
    size = sum(map(len, blobs))
    if not size:
        return Answer((head,), None)
    return Answer((b"".join((head, *blobs)),) if size < _COPIED else (head, *blobs), len(head))
