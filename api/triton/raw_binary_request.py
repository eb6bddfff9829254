"""A v2 request that is nothing but the one input of its model: no JSON at all.

v2's section 3.4 in code; the shape is what the model's config says and the bytes leave free.
"""

import math

import msgspec

from ...core.model import ModelConfig
from ...core.request import InferRequest
from ...core.tensor import Tensor, TensorSpec
from .. import json_tensors, raw_tensors


def read_raw_binary_request(config: ModelConfig, body: memoryview) -> InferRequest:
    """The tensor is a view of the body.

    Raises:
        InvalidArgument: the model has several inputs, or not this one.
    """
    if len(config.inputs) != 1:
        text = f"to be deduced but got {len(config.inputs)} inputs in '{config.name}' model configuration"
        raise raw_tensors.InputRef("", config.name, "").error(f"Raw request must only have 1 input (found 1) {text}")
    [spec] = config.inputs
    place = raw_tensors.InputRef("", config.name, spec.name)
    tensor = _only(spec, body, place)
    if config.max_batch_size > 0:
        tensor = msgspec.structs.replace(tensor, shape=(1, *tensor.shape))
    return InferRequest(inputs={spec.name: tensor})


def _only(spec: TensorSpec, body: memoryview, place: raw_tensors.InputRef) -> Tensor:
    """Dims may leave one free, which the number of bytes says; strings say their number themselves: there is one."""
    free = spec.dims.count(-1)
    if free > 1:
        text = f"The shape of the raw input '{spec.name}' can not be deduced because there are more than one"
        raise place.error(f"{text} variable-sized dimension")
    count = math.prod(dim for dim in spec.dims if dim >= 0)
    if spec.datatype == "BYTES":
        if free or count != 1:
            raise place.error(f"For BYTE datatype raw input '{spec.name}', the model must have input shape [1]")
        return Tensor(spec.name, "BYTES", spec.dims, raw_tensors.string_array([bytes(body)], 1, place))
    row = json_tensors.byte_size(spec.datatype, count)
    shape = tuple((len(body) // row if row else 0) if dim < 0 else dim for dim in spec.dims)
    return raw_tensors.decode(spec.datatype, shape, body, place)
