"""A response of v2's infer over HTTP: JSON, with raw tensors behind it where the request asked for them."""

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ...core.model import ModelConfig
from ...core.request import InferResponse
from ...core.tensor import Tensor
from .. import json_tensors, raw_tensors
from ..infer_call import InferCall

_COPIED = 1 << 16
"""Bytes of tensors up to which it is cheaper to join them than to send them apart."""

LONG_OUTPUT_ELEMENTS = json_tensors.PIECE_ELEMENTS
"""Elements beyond which an output is written in pieces."""


class EncodedInferResponse(NamedTuple):
    """A body in parts. `header_length`: bytes of the JSON in front, None if there is nothing but JSON."""

    parts: Sequence[bytes | memoryview]
    header_length: int | None

    @property
    def size(self) -> int:
        return sum(map(len, self.parts))


def is_long(call: InferCall, response: InferResponse) -> bool:
    """Whether encoding the response takes longer than the event loop should be held."""
    for tensor in response.outputs:
        if tensor.data.size > LONG_OUTPUT_ELEMENTS:
            output = call.outputs.get(tensor.name, call.default_output)
            if tensor.datatype == "BYTES" or not (output.binary or output.memory is not None):
                return True
    return False


def encode_infer_response(config: ModelConfig, call: InferCall, response: InferResponse) -> EncodedInferResponse:
    """The body of the response, each output as `call` asks for it.

    Raises `CharoniaError` if an output cannot be returned like that.
    """
    outputs: list[_OutputJson] = []
    blobs: list[bytes | memoryview] = []
    strict = True
    for given in response.outputs:
        wanted = call.outputs.get(given.name, call.default_output)
        tensor = wanted.apply(config, given)
        members: dict[str, Any] = {"name": tensor.name, "datatype": tensor.datatype, "shape": tensor.shape}
        long = None
        if wanted.binary:
            blob = raw_tensors.encode(tensor) if tensor.data.nbytes < _COPIED else raw_tensors.encode_view(tensor)
            blobs.append(blob)
            members["parameters"] = {"binary_data_size": len(blob)}
        elif wanted.memory is None:
            strict = strict and json_tensors.is_strict_json(tensor)
            if tensor.data.size > LONG_OUTPUT_ELEMENTS:
                long = tensor
            else:
                members["data"] = json_tensors.to_list(tensor)
        outputs.append(_OutputJson(members, long))
    document: dict[str, Any] = {"id": call.request.id} if call.request.id else {}
    document["model_name"], document["model_version"] = config.name, config.version
    if response.parameters:
        document["parameters"] = response.parameters
    if any(each.long is not None for each in outputs):
        head = _long_json(document, outputs, strict)
    else:
        document["outputs"] = [each.members for each in outputs]
        head = [json_tensors.dump_json(document, strict)]
    return _assemble(head, blobs)


def _assemble(head: list[bytes], blobs: list[bytes | memoryview]) -> EncodedInferResponse:
    size = sum(map(len, blobs))
    if not size:
        return EncodedInferResponse(head, None)
    length = sum(map(len, head))
    parts = (b"".join((*head, *blobs)),) if size < _COPIED and len(head) == 1 else (*head, *blobs)
    return EncodedInferResponse(parts, length)


class _OutputJson(NamedTuple):
    """An output's JSON object, but for the data of a `long` one."""

    members: dict[str, Any]
    long: Tensor | None


def _long_json(document: dict[str, Any], outputs: Iterable[_OutputJson], strict: bool) -> list[bytes]:
    """The JSON of a response with these outputs, in pieces, of which none takes long to make."""
    parts, between = [json_tensors.dump_json(document, strict)[:-1], b',"outputs":['], b""
    for each in outputs:
        parts.append(between + json_tensors.dump_json(each.members, strict))
        if each.long is not None:
            parts[-1] = parts[-1][:-1] + b',"data":['
            parts += json_tensors.encode_in_pieces(each.long, strict)
            parts.append(b"]}")
        between = b","
    return [*parts, b"]}"]
