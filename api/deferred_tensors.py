"""Inputs that take long to decode: held against the model first, decoded in pieces or beside the event loop.

Knows how tensors look as JSON and as raw strings; not what protocol brings them.
"""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import TypeAlias

import msgspec
import numpy as np

from ..core.model import ModelConfig
from ..core.request import InferRequest
from ..core.tensor import NUMPY_TYPES, Tensor
from ..repository.request_validation import check
from . import json_tensors, raw_tensors
from .chunked_json import PIECE, Long
from .json_values import mismatch

Decode: TypeAlias = Callable[[], Awaitable[Tensor]]
"""Makes the tensor that an empty one of its name, datatype and shape stands for until then."""

Later: TypeAlias = dict[str, Decode]
"""By input."""

LONG = PIECE
"""Bytes of strings that are decoded beside the loop."""

_NOTHING = np.empty(0, np.uint8)


def promise(datatype: str, shape: tuple[int, ...], place: raw_tensors.Place) -> Tensor:
    """What stands for the tensor; raises `InvalidArgument` as `raw.element_count` does."""
    raw_tensors.element_count(datatype, shape, place)
    return Tensor(place.input, datatype, shape, _NOTHING)


async def decoded(config: ModelConfig, request: InferRequest, later: Later) -> InferRequest:
    """The request with all its inputs.

    Raises:
        InvalidArgument: it does not fit the model, and nothing was decoded; or an input cannot be.
    """
    check(config, request)
    inputs = {name: await decode() for name, decode in later.items()}
    return msgspec.structs.replace(request, inputs={**request.inputs, **inputs})


def strings(tensor: Tensor, source: raw_tensors.Raw, place: raw_tensors.Place) -> Decode:
    """Of raw bytes."""
    return partial(asyncio.to_thread, raw_tensors.decode, tensor.datatype, tensor.shape, source, place)


def from_json(tensor: Tensor, source: Long, place: raw_tensors.Place) -> Decode:
    """Of an array. Raises `InvalidArgument` for what is none."""
    if source.is_object:
        raise mismatch("data", "non-array as array")
    return partial(_from_json, tensor, source, place)


async def _from_json(tensor: Tensor, source: Long, place: raw_tensors.Place) -> Tensor:
    datatype, done = tensor.datatype, 0
    count = raw_tensors.element_count(datatype, tensor.shape, place)
    data = np.empty(count, NUMPY_TYPES[datatype])
    async for piece in source.flat():
        values = json_tensors.flat(piece)
        if done + len(values) > count:
            json_tensors.check_count(datatype, count, done + len(values))
        data[done : done + len(values)] = json_tensors.elements(datatype, values, "data")
        done += len(values)
    json_tensors.check_count(datatype, count, done)
    return msgspec.structs.replace(tensor, data=data.reshape(tensor.shape))
