"""A v2 request that is nothing but the one input of its model: no JSON at all.

v2's section 3.4 in code; the shape is what the model's config says and the bytes leave free.
"""

import math

import msgspec

from ..core.errors import InvalidArgument
from ..core.model import ModelConfig
from ..core.request import InferRequest
from ..core.tensor import Tensor, TensorSpec
from . import json_tensors, raw


def read_raw(config: ModelConfig, body: memoryview) -> InferRequest:
    """The tensor is a view of the body.

    Raises:
        InvalidArgument: the model has several inputs, or not this one.
    """
    if len(config.inputs) != 1:
        found = len(config.inputs)
        raise InvalidArgument(f"Raw request must only have 1 input (found {found}) to be deduced")
    spec, place = config.inputs[0], raw.Place("", config.name, config.inputs[0].name)
    if spec.datatype == "BYTES":
        tensor = _one_string(spec, body)
    else:
        tensor = raw.decode(spec.datatype, _deduced(spec, len(body)), body, place)
    if config.max_batch_size > 0:
        tensor = msgspec.structs.replace(tensor, shape=(1, *tensor.shape))
    return InferRequest(inputs={spec.name: tensor})


def _one_string(spec: TensorSpec, body: memoryview) -> Tensor:
    if spec.dims not in ((1,), (-1,)):
        text = f"For BYTES datatype raw input '{spec.name}', the model must have input shape [1]"
        raise InvalidArgument(text, field=spec.name)
    return Tensor.of(spec.name, "BYTES", [bytes(body)])


def _deduced(spec: TensorSpec, size: int) -> tuple[int, ...]:
    """The shape of an input of so many bytes."""
    free = [axis for axis, dim in enumerate(spec.dims) if dim < 0]
    if len(free) > 1:
        text = f"The shape of Raw input '{spec.name}' can not be deduced because there are more than one variable-sized"
        raise InvalidArgument(f"{text} dimension", field=spec.name)
    row = json_tensors.byte_size(spec.datatype, math.prod(dim for dim in spec.dims if dim >= 0))
    return tuple((size // row if row else 0) if dim < 0 else dim for dim in spec.dims)
