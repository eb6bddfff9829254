"""The trace of one request: whether it is kept, by which settings, and the tensors that went in and came out.

A tensor becomes text when it passes: what clients lend in shared memory may be something else a moment later.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from ..core.gateway import ResponseStream
from ..core.request import InferResponse
from ..core.request_context import RequestContext
from ..core.tensor import Tensor
from .trace_settings import TraceControl, TraceSettings

TensorText: TypeAlias = dict[str, str]
"""A tensor's `name`, `data`, `shape` and `dtype` as tritonserver writes them, elements and dims between commas."""

_MAX_ELEMENTS = 1 << 14
"""Elements of one tensor that are written; the event loop waits meanwhile, a millisecond for each thousand."""

_MAX_STRING_BYTES = 1 << 18
"""Bytes of one tensor's strings that are written."""

_MAX_CHARACTERS = 1 << 20
"""Characters of all of a request's inputs, or outputs, after which elements are left out."""

_MAX_TENSORS = 1024
"""Tensors of a request's inputs, or outputs, that are written: a stream has no end."""


@dataclass(slots=True)
class TracedTensors:
    """The tensors of one direction of a request, as texts, up to the limits above."""

    texts: list[TensorText] = field(default_factory=list)
    _room: int = _MAX_CHARACTERS

    def add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in islice(tensors, _MAX_TENSORS - len(self.texts)):
            data = _tensor_text(tensor) if self._room > 0 else "..."
            self._room -= len(data)
            shape = ",".join(map(str, tensor.shape))
            self.texts.append({"name": tensor.name, "data": data, "shape": shape, "dtype": tensor.datatype})


@dataclass(slots=True)
class RequestTrace:
    """The trace of a request: the settings that it is traced by, and its tensors if they ask for them."""

    settings: TraceSettings
    inputs: TracedTensors = field(default_factory=TracedTensors)
    outputs: TracedTensors = field(default_factory=TracedTensors)


def request_trace(context: RequestContext, traces: TraceControl) -> RequestTrace | None:
    """The trace of a request, if it is to leave one: the first call decides it. A request that is for no model
    leaves none; one that a model made is in the trace of the request that it was made for."""
    if not context.sampled and context.parent is not None:
        context.sampled = True
        parent = cast("RequestTrace | None", context.parent.trace)
        context.trace = None if parent is None else RequestTrace(parent.settings)
    if not context.sampled:
        settings = traces.sample_request(context.model) if context.model_found else None
        context.sampled = True
        context.trace = None if settings is None else RequestTrace(settings)
        traces.open_traces += settings is not None
    return cast("RequestTrace | None", context.trace)


def trace_tensors(
    trace: RequestTrace | None, inputs: Iterable[Tensor], answers: AsyncIterator[InferResponse]
) -> AsyncIterator[InferResponse]:
    """The answers as they are; where the settings say TENSORS, the trace keeps what goes in, and what passes."""
    if trace is None or not trace.settings.records_tensors:
        return answers
    trace.inputs.add(inputs)
    return _copy_outputs(trace.outputs, answers)


async def _copy_outputs(
    kept: TracedTensors, answers: AsyncIterator[InferResponse]
) -> AsyncGenerator[InferResponse, None]:
    async with aclosing(cast("ResponseStream[InferResponse]", answers)) as stream:
        async for response in stream:
            kept.add(response.outputs)
            yield response


def _tensor_text(tensor: Tensor) -> str:
    flat = tensor.data.reshape(-1)
    first = flat[:_MAX_ELEMENTS]
    elements = _string_texts(first) if tensor.datatype == "BYTES" else _number_texts(tensor.datatype, first)
    if len(elements) < len(flat):
        elements.append("...")
    return ",".join(elements)


def _number_texts(datatype: str, flat: NDArray[Any]) -> list[str]:
    """Floats as short as they can be told; of FP32 eight digits."""
    if datatype == "BF16":
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    if datatype in ("FP16", "BF16", "FP32"):
        return [format(value, ".8g") for value in flat.tolist()]
    return [str(int(value)) if datatype == "BOOL" else str(value) for value in flat.tolist()]


def _string_texts(flat: NDArray[Any]) -> list[str]:
    """In quotes; bytes that are no text are escaped."""
    room, written = _MAX_STRING_BYTES, []
    for element in flat:
        room -= len(element)
        if room < 0:
            break
        written.append(f'"{element.decode(errors="backslashreplace")}"')
    return written
