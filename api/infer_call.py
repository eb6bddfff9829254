"""An inference request as an endpoint reads it, the same over HTTP and gRPC, and the rules for a single response.

Inputs that take long to decode are validated against the model first, then decoded in pieces or in another thread.
"""

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np

from ..core.errors import Internal, InvalidArgument
from ..core.gateway import ModelHandle, ResponseStream
from ..core.model import ModelConfig
from ..core.request import InferRequest, InferResponse
from ..core.tensor import NUMPY_TYPES, Tensor
from ..processes import gc_tuning
from ..processes.client_shared_memory import CudaSlice, LentMemory
from . import json_tensors, raw_tensors, size_limits
from .chunked_json import PIECE_BYTES, UnparsedContainer
from .raw_tensors import DeclaredInput, RawBytes

_MOST_ELEMENTS = 1_000_000


class RequestedOutput(NamedTuple):
    """How an output is to be returned.

    `classes`: as so many of its greatest elements, 0 for the output itself; `memory`: in this memory, lent by the
    client while the request lasts, None for in the response; `binary`: as raw bytes behind the JSON (HTTP only).
    """

    classes: int = 0
    memory: LentMemory | None = None
    binary: bool = False

    def apply(self, config: ModelConfig, output: Tensor) -> Tensor:
        """The tensor that the response tells of; its data are written to `memory` if there is one. Raises
        `InvalidArgument` for an output that cannot be classified, `Internal` for one larger than the memory."""
        tensor = classify(config, output, self.classes) if self.classes else output
        if self.memory is None:
            return tensor
        raw = raw_tensors.encode_view(tensor)
        if len(raw) > len(self.memory):
            raise Internal(
                f"shared memory size specified with the request for output '{tensor.name}' ({len(self.memory)} bytes) "
                f"should be at least {len(raw)} bytes to hold the results",
                field=tensor.name,
            )
        if isinstance(self.memory, CudaSlice):
            self.memory.write(raw)
        else:  # numpy copies without the interpreter's lock
            np.frombuffer(self.memory, np.uint8, len(raw))[:] = np.frombuffer(raw, np.uint8)
        return tensor


def classify(config: ModelConfig, output: Tensor, classes: int) -> Tensor:
    """The `classes` largest values of an output as BYTES `value:index` or `value:index:label`, the largest first.

    Its shape is [batch, classes], or [classes] for a model that does not batch, with fewer classes where the output has
    fewer values. Raises `InvalidArgument` if the output's datatype has no order, or it is too large.
    """
    if output.data.dtype.kind not in "iuf" or output.datatype in ("FP16", "BF16"):
        text = f"class result not available for output due to unsupported type '{output.datatype}'"
        raise InvalidArgument(text, field=output.name)
    if math.prod(output.shape) > _MOST_ELEMENTS:
        raise InvalidArgument("classification output tensor too large", field=output.name)
    batched = config.max_batch_size > 0 and len(output.shape) > 0
    one = output.shape[1:] if batched else output.shape
    rows = output.data.reshape(output.shape[0] if batched else 1, math.prod(one))
    count, labels = min(classes, rows.shape[1]), config.labels.get(output.name, ())
    data = np.empty((len(rows), count), np.object_)
    for place, row in enumerate(rows):
        # Indices by falling value, equal values in their order, NaN last.
        values = np.where(np.isnan(row), -np.inf, row) if row.dtype.kind == "f" else row
        greatest = len(row) - 1 - np.argsort(values[::-1], kind="stable")[::-1]
        data[place, :] = [_class(row[index].item(), index, labels) for index in greatest[:count].tolist()]
    shape = (len(rows), count) if batched else (count,)
    return Tensor(output.name, "BYTES", shape, data.reshape(shape))


def _class(value: int | float, index: int, labels: tuple[str, ...]) -> bytes:
    number = f"{value:f}" if isinstance(value, float) else str(value)
    label = labels[index] if index < len(labels) else ""
    return f"{number}:{index}:{label}".encode() if label else f"{number}:{index}".encode()


DecodeTensor: TypeAlias = Callable[[], Awaitable[Tensor]]

DeferredInputs: TypeAlias = dict[str, DecodeTensor]
"""By the name of an input, the function that decodes its tensor; an empty one stands for it until then."""

LONG_STRING_BYTES = PIECE_BYTES
"""Bytes of strings above which they are decoded in another thread."""

_NO_ELEMENTS = np.empty(0, np.uint8)
_STREAM = "stream"
_TRUE = (True, "true", "True", "TRUE", "1")


class InferCall(msgspec.Struct, frozen=True):
    """The request, how the outputs that it names are to be returned, and how all others are. `deferred`: inputs that
    are empty in the request until `decode_deferred`."""

    request: InferRequest
    outputs: Mapping[str, RequestedOutput]
    default_output: RequestedOutput = RequestedOutput()
    deferred: DeferredInputs = {}

    @property
    def writes_to_gpu(self) -> bool:
        """Whether an output is copied to a GPU, which `RequestedOutput.apply` then waits for."""
        return any(isinstance(output.memory, CudaSlice) for output in self.outputs.values())

    @property
    def returns_plainly(self) -> bool:
        """Whether its outputs come as they are, in the response: nothing of them can be refused but their size."""
        return not (
            self.outputs and any(output.classes or output.memory is not None for output in self.outputs.values())
        )

    async def decode_deferred(self, model: ModelHandle) -> "InferCall":
        """The call with all its inputs, decoded once the model finds that the request fits it. Raises `InvalidArgument`
        if it does not fit, before anything is decoded, or if an input cannot be decoded."""
        model.validate(self.request)
        inputs = {name: await decode() for name, decode in self.deferred.items()}
        request = msgspec.structs.replace(self.request, inputs={**self.request.inputs, **inputs})
        return msgspec.structs.replace(self, request=request, deferred={})


def defer(declared: DeclaredInput, decode: DecodeTensor, deferred: DeferredInputs) -> Tensor:
    """Leave an input to `deferred`; the empty tensor that stands for it until then. Raises as
    `raw_tensors.element_count`."""
    raw_tensors.element_count(declared)
    deferred[declared.name] = decode
    return declared.tensor(_NO_ELEMENTS)


def raw_input(declared: DeclaredInput, data: RawBytes | CudaSlice, deferred: DeferredInputs) -> Tensor:
    """The tensor that raw bytes hold; many strings, and what lies on a GPU, are left to `deferred`."""
    if isinstance(data, CudaSlice):
        raw_tensors.check_raw_length(declared, len(data))
        return defer(declared, partial(asyncio.to_thread, _copy_input, declared, data), deferred)
    if declared.datatype != "BYTES" or len(data) <= LONG_STRING_BYTES:
        return raw_tensors.decode(declared, data)
    return defer(declared, partial(asyncio.to_thread, raw_tensors.decode, declared, data), deferred)


def _copy_input(declared: DeclaredInput, data: CudaSlice) -> Tensor:
    return raw_tensors.decode(declared, data.read())


async def decode_long_json(declared: DeclaredInput, array: UnparsedContainer) -> Tensor:
    """The tensor whose elements are a long array of JSON, which is parsed in pieces."""
    count = raw_tensors.element_count(declared)
    datatype = declared.datatype
    written = 0
    data = np.empty(count, NUMPY_TYPES[datatype])
    async for piece in array.flat_elements():
        values = json_tensors.flatten(piece)
        if written + len(values) > count:
            json_tensors.check_element_count(datatype, count, written + len(values))
        data[written : written + len(values)] = json_tensors.to_array(datatype, values, "data")
        written += len(values)
    json_tensors.check_element_count(datatype, count, written)
    return declared.tensor(data.reshape(declared.shape))


class ResponseSize:
    """Counts the bytes of a response's tensors. `limit`: of all that are returned raw; of those that become JSON, whose
    text is several times as long, a quarter of it."""

    def __init__(self, limit: int) -> None:
        self._limits = limit, limit // size_limits.JSON_SHARE
        self._sizes = [0, 0]

    def add(self, tensor: Tensor, as_json: bool) -> None:
        """Raises `InvalidArgument` for the output that is one too many: a client may ask for less, or otherwise."""
        self._sizes[as_json] = size = self._sizes[as_json] + raw_tensors.byte_size(tensor)
        if size > self._limits[as_json]:
            raise size_limits.response_too_large(tensor.name, size, self._limits[as_json], as_json)


def release_memory_after(response: InferResponse) -> None:
    """Have the memory that a large response leaves free given back before long. For the event loop's thread."""
    for tensor in response.outputs:
        texts = tensor.datatype == "BYTES" and raw_tensors.is_long(tensor)
        if texts or tensor.data.nbytes > gc_tuning.LARGE_REQUEST_BYTES:
            gc_tuning.release_memory_soon()


async def read_up_to_two(responses: ResponseStream[InferResponse], decoupled: bool) -> list[InferResponse]:
    """The first response of a stream, and a second where there is one: enough to tell whether it holds exactly one. A
    final response without outputs counts only if the model is not `decoupled`. The caller closes the stream."""
    answers: list[InferResponse] = []
    async for response in responses:
        if not (decoupled and is_empty_final(response)):
            answers.append(response)
        if response.final or len(answers) == 2:
            break
    return answers


def is_empty_final(response: InferResponse) -> bool:
    """Whether a response of a decoupled model tells nothing but that it is the last."""
    return response.final and not (response.outputs or response.parameters)


def supports_single_response(config: ModelConfig) -> bool:
    """Whether a model returns one response to a request: always, or, decoupled, when its input `stream` is false."""
    return not config.decoupled or any(spec.name == _STREAM and spec.datatype == "BOOL" for spec in config.inputs)


def wants_stream(request: InferRequest) -> bool:
    """Whether a request to a decoupled model asks for a stream, by the input or the parameter `stream`."""
    if _STREAM in request.inputs:
        return bool(request.inputs[_STREAM].data.any())
    return request.parameters.get(_STREAM, request.parameters.get("streaming", False)) in _TRUE
