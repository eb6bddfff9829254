"""Inputs that take long to decode: validated against the model first, then decoded in pieces or in another thread.

Knows how tensors look as JSON and as raw strings; not which protocol brings them.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

import msgspec
import numpy as np

from ..core.request import InferRequest
from ..core.tensor import NUMPY_TYPES, Tensor
from . import json_tensors, raw_tensors
from .chunked_json import PIECE_BYTES, UnparsedContainer
from .json_values import wrong_json_type

DecodeTensor: TypeAlias = Callable[[], Awaitable[Tensor]]
"""Decodes the tensor for which an empty one of its name, datatype and shape stands until then."""

DeferredInputs: TypeAlias = dict[str, DecodeTensor]
"""By the name of the input."""

LONG_STRING_BYTES = PIECE_BYTES
"""Bytes of strings above which they are decoded in another thread."""

_NOTHING = np.empty(0, np.uint8)


def placeholder_tensor(datatype: str, shape: tuple[int, ...], place: raw_tensors.InputRef) -> Tensor:
    """The empty tensor that stands for it; raises `InvalidArgument` as `raw_tensors.element_count` does."""
    raw_tensors.element_count(datatype, shape, place)
    return Tensor(place.input, datatype, shape, _NOTHING)


async def decode_deferred(
    validate: Callable[[InferRequest], None], request: InferRequest, deferred: DeferredInputs
) -> InferRequest:
    """The request with all its inputs, decoded once `validate` finds that it fits the model (`ModelHandle.validate`).

    Raises:
        InvalidArgument: it does not fit the model, and nothing was decoded; or an input cannot be.
    """
    validate(request)
    inputs = {name: await decode() for name, decode in deferred.items()}
    return msgspec.structs.replace(request, inputs={**request.inputs, **inputs})


def deferred_strings(tensor: Tensor, source: raw_tensors.RawBytes, place: raw_tensors.InputRef) -> DecodeTensor:
    """Decodes raw bytes."""
    return partial(asyncio.to_thread, raw_tensors.decode, tensor.datatype, tensor.shape, source, place)


def deferred_json(tensor: Tensor, source: UnparsedContainer, place: raw_tensors.InputRef) -> DecodeTensor:
    """Decodes an array of JSON. Raises `InvalidArgument` for an object."""
    if source.is_object:
        raise wrong_json_type("data", "non-array as array")
    return partial(_from_json, tensor, source, place)


async def _from_json(tensor: Tensor, source: UnparsedContainer, place: raw_tensors.InputRef) -> Tensor:
    datatype, done = tensor.datatype, 0
    count = raw_tensors.element_count(datatype, tensor.shape, place)
    data = np.empty(count, NUMPY_TYPES[datatype])
    async for piece in source.flat_elements():
        values = json_tensors.flatten(piece)
        if done + len(values) > count:
            json_tensors.check_element_count(datatype, count, done + len(values))
        data[done : done + len(values)] = json_tensors.to_array(datatype, values, "data")
        done += len(values)
    json_tensors.check_element_count(datatype, count, done)
    return msgspec.structs.replace(tensor, data=data.reshape(tensor.shape))
