"""An inference request as an endpoint reads it, the same over HTTP and gRPC, and the rules for a single response.

Inputs that take long to decode are validated against the model first, then decoded in pieces or in another thread.
Knows how tensors look as JSON and as raw bytes; not which protocol brings them.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from ..core.gateway import ModelHandle, ResponseStream
from ..core.model import ModelConfig
from ..core.request import InferRequest, InferResponse
from ..core.tensor import NUMPY_TYPES, Tensor
from . import json_tensors, raw_tensors
from .chunked_json import PIECE_BYTES, UnparsedContainer
from .raw_tensors import DeclaredInput, RawBytes
from .requested_outputs import RequestedOutput

DecodeTensor: TypeAlias = Callable[[], Awaitable[Tensor]]

DeferredInputs: TypeAlias = dict[str, DecodeTensor]
"""By the name of an input, the function that decodes its tensor; an empty one stands for it until then."""

LONG_STRING_BYTES = PIECE_BYTES
"""Bytes of strings above which they are decoded in another thread."""

_NO_ELEMENTS = np.empty(0, np.uint8)
_STREAM = "stream"
_TRUE = (True, "true", "True", "TRUE", "1")


class InferCall(NamedTuple):
    """The request, how the outputs that it names are to be returned, and how all others are. `deferred`: inputs that
    are empty in the request until `decode_deferred`."""

    request: InferRequest
    outputs: Mapping[str, RequestedOutput]
    default_output: RequestedOutput = RequestedOutput()
    deferred: DeferredInputs = {}

    async def decode_deferred(self, model: ModelHandle) -> "InferCall":
        """The call with all its inputs, decoded once the model finds that the request fits it. Raises `InvalidArgument`
        if it does not fit, before anything is decoded, or if an input cannot be decoded."""
        model.validate(self.request)
        inputs = {name: await decode() for name, decode in self.deferred.items()}
        request = msgspec.structs.replace(self.request, inputs={**self.request.inputs, **inputs})
        return self._replace(request=request, deferred={})


def defer(given: DeclaredInput, decode: DecodeTensor, deferred: DeferredInputs) -> Tensor:
    """Leave an input to `deferred`; the empty tensor that stands for it until then. Raises as
    `raw_tensors.element_count`."""
    raw_tensors.element_count(given)
    deferred[given.name] = decode
    return given.tensor(_NO_ELEMENTS)


def raw_input(given: DeclaredInput, data: RawBytes, deferred: DeferredInputs) -> Tensor:
    """The tensor that raw bytes hold; many strings are left to `deferred`."""
    if given.datatype != "BYTES" or len(data) <= LONG_STRING_BYTES:
        return raw_tensors.decode(given, data)
    return defer(given, partial(asyncio.to_thread, raw_tensors.decode, given, data), deferred)


async def decode_long_json(given: DeclaredInput, array: UnparsedContainer) -> Tensor:
    """The tensor whose elements are a long array of JSON, which is parsed in pieces."""
    count, datatype, done = raw_tensors.element_count(given), given.datatype, 0
    data = np.empty(count, NUMPY_TYPES[datatype])
    async for piece in array.flat_elements():
        values = json_tensors.flatten(piece)
        if done + len(values) > count:
            json_tensors.check_element_count(datatype, count, done + len(values))
        data[done : done + len(values)] = json_tensors.to_array(datatype, values, "data")
        done += len(values)
    json_tensors.check_element_count(datatype, count, done)
    return given.tensor(data.reshape(given.shape))


async def read_up_to_two(responses: ResponseStream[InferResponse]) -> list[InferResponse]:
    """The first response of a stream, and a second where there is one: enough to tell whether it holds exactly one. A
    final response without outputs does not count. The caller closes the stream."""
    answers: list[InferResponse] = []
    async for response in responses:
        if not is_empty_final(response):
            answers.append(response)
        if response.final or len(answers) == 2:
            break
    return answers


def is_empty_final(response: InferResponse) -> bool:
    """Whether a response tells nothing but that it is the last."""
    return response.final and not response.outputs


def supports_single_response(config: ModelConfig) -> bool:
    """Whether a model returns one response to a request: always, or, decoupled, when its input `stream` is false."""
    return not config.decoupled or any(spec.name == _STREAM and spec.datatype == "BOOL" for spec in config.inputs)


def wants_stream(asked: InferRequest) -> bool:
    """Whether a request to a decoupled model asks for a stream, by the input or the parameter `stream`."""
    if _STREAM in asked.inputs:
        return bool(asked.inputs[_STREAM].data.any())
    return asked.parameters.get(_STREAM, asked.parameters.get("streaming", False)) in _TRUE
