"""A model's response as v2 has it over HTTP: JSON, with raw tensors behind it where they were asked for.

Knows v2's sections 3.2, 3.3 and 3.7 and nothing of HTTP beyond its body.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from ...core.model import ModelConfig
from ...core.request import InferResponse
from ...core.tensor import Tensor
from .. import json_tensors, raw_tensors
from ..classification import classify
from ..requested_outputs import write_to_shared_memory
from .infer_call import HttpInferRequest

_COPIED = 1 << 16
"""Bytes of tensors up to which it is cheaper to join them than to send them apart."""

LONG_OUTPUT_ELEMENTS = json_tensors.PIECE_ELEMENTS
"""Elements beyond which an output is written in pieces."""


class EncodedInferResponse(NamedTuple):
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

    def output(self, tensor: Tensor, binary: bool, memory: memoryview | None) -> "_Output":
        said: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        if memory is not None:
            write_to_shared_memory(tensor, memory)
        elif binary:
            blob = raw_tensors.encode(tensor) if tensor.data.nbytes < _COPIED else raw_tensors.encode_view(tensor)
            self.blobs.append(blob)
            said["parameters"] = {"binary_data_size": len(blob)}
        else:
            self.strict = self.strict and json_tensors.is_strict_json(tensor)
            if tensor.data.size > LONG_OUTPUT_ELEMENTS:
                return _Output(said, tensor)
            said["data"] = json_tensors.to_list(tensor)
        return _Output(said)


class _Output(NamedTuple):
    """An output's JSON, but for the data of a `long` one."""

    said: dict[str, Any]
    long: Tensor | None = None


def is_long(call: HttpInferRequest, response: InferResponse) -> bool:
    """What the response says takes longer than the event loop should be held."""
    for tensor in response.outputs:
        if tensor.data.size > LONG_OUTPUT_ELEMENTS:
            wanted = call.outputs.get(tensor.name, call.default_output)
            if tensor.datatype == "BYTES" or not (wanted.binary or wanted.memory is not None):
                return True
    return False


def encode_infer_response(config: ModelConfig, call: HttpInferRequest, response: InferResponse) -> EncodedInferResponse:
    """The body that says `response` as `call` wants it.

    Raises:
        CharoniaError: an output cannot be said like that.
    """
    writing, outputs = _Writing([]), []
    for tensor in response.outputs:
        binary, classes, memory = call.outputs.get(tensor.name, call.default_output)
        outputs.append(writing.output(classify(config, tensor, classes) if classes else tensor, binary, memory))
    document: dict[str, Any] = {"id": call.request.id} if call.request.id else {}
    document["model_name"], document["model_version"] = config.name, config.version
    if response.parameters:
        document["parameters"] = response.parameters
    if any(each.long is not None for each in outputs):
        head = _long_json(document, outputs, writing.strict)
    else:
        document["outputs"] = [each.said for each in outputs]
        head = [json_tensors.dump_json(document, writing.strict)]
    return _answer(head, writing.blobs)


def _long_json(document: dict[str, Any], outputs: Iterable[_Output], strict: bool) -> list[bytes]:
    """The document with these outputs, in pieces, of which none took long to make."""
    parts, between = [json_tensors.dump_json(document, strict)[:-1], b',"outputs":['], b""
    for each in outputs:
        said = json_tensors.dump_json(each.said, strict)
        parts.append(between + said)
        if each.long is not None:
            parts[-1] = parts[-1][:-1] + b',"data":['
            parts += json_tensors.encode_in_pieces(each.long, strict)
            parts.append(b"]}")
        between = b","
    return [*parts, b"]}"]


def _answer(head: list[bytes], blobs: list[bytes | memoryview]) -> EncodedInferResponse:
    size = sum(map(len, blobs))
    if not size:
        return EncodedInferResponse(head, None)
    length = sum(map(len, head))
    return EncodedInferResponse(
        (b"".join((*head, *blobs)),) if size < _COPIED and len(head) == 1 else (*head, *blobs), length
    )
