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

from ..core.gateway import Stream
from ..core.request import InferResponse
from ..core.request_context import Exchange
from ..core.tensor import Tensor
from ..core.trace_settings import Traces, TraceSettings

TensorText: TypeAlias = dict[str, str]
"""A tensor's `name`, `data`, `shape` and `dtype` as tritonserver writes them, elements and dims between commas."""

_ELEMENTS = 1 << 14
"""Elements of one tensor that are written; the event loop waits meanwhile, a millisecond for each thousand."""

_BYTES = 1 << 18
"""Bytes of one tensor's strings that are written."""

_CHARACTERS = 1 << 20
"""Characters of all of a request's inputs, or outputs, after which elements are left out."""

_TENSORS = 1024
"""Tensors of a request's inputs, or outputs, that are written: a stream has no end."""


@dataclass(slots=True)
class Tensors:
    """Those that passed one way, as far as they are kept."""

    texts: list[TensorText] = field(default_factory=list)
    _room: int = _CHARACTERS

    def add(self, tensors: Iterable[Tensor]) -> None:
        for tensor in islice(tensors, _TENSORS - len(self.texts)):
            data = _data(tensor) if self._room > 0 else "..."
            self._room -= len(data)
            shape = ",".join(map(str, tensor.shape))
            self.texts.append({"name": tensor.name, "data": data, "shape": shape, "dtype": tensor.datatype})


@dataclass(slots=True)
class Trace:
    """Of a request that is traced by `settings`."""

    settings: TraceSettings
    inputs: Tensors = field(default_factory=Tensors)
    outputs: Tensors = field(default_factory=Tensors)


def trace_of(exchange: Exchange, traces: Traces) -> Trace | None:
    """The trace of a request, if it is to leave one: the first call decides it. A request that is for no model
    leaves none."""
    if not exchange.sampled:
        settings = traces.picks(exchange.model) if exchange.found else None
        exchange.sampled = True
        exchange.trace = None if settings is None else Trace(settings)
        traces.pending += settings is not None
    return exchange.trace


def traced(
    trace: Trace | None, inputs: Iterable[Tensor], answers: AsyncIterator[InferResponse]
) -> AsyncIterator[InferResponse]:
    """The answers as they are; where the settings say TENSORS, the trace keeps what goes in, and what passes."""
    if trace is None or not trace.settings.tensors:
        return answers
    trace.inputs.add(inputs)
    return _traced(trace.outputs, answers)


async def _traced(kept: Tensors, answers: AsyncIterator[InferResponse]) -> AsyncGenerator[InferResponse, None]:
    async with aclosing(cast("Stream[InferResponse]", answers)) as stream:
        async for response in stream:
            kept.add(response.outputs)
            yield response


def _data(tensor: Tensor) -> str:
    flat = tensor.data.reshape(-1)
    first = flat[:_ELEMENTS]
    elements = _strings(first) if tensor.datatype == "BYTES" else _numbers(tensor.datatype, first)
    if len(elements) < len(flat):
        elements.append("...")
    return ",".join(elements)


def _numbers(datatype: str, flat: NDArray[Any]) -> list[str]:
    """Floats as short as they can be told; of FP32 eight digits."""
    if datatype == "BF16":
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    if datatype in ("FP16", "BF16", "FP32"):
        return [format(value, ".8g") for value in flat.tolist()]
    return [str(int(value)) if datatype == "BOOL" else str(value) for value in flat.tolist()]


def _strings(flat: NDArray[Any]) -> list[str]:
    """In quotes; bytes that are no text are escaped."""
    room, written = _BYTES, []
    for element in flat:
        room -= len(element)
        if room < 0:
            break
        written.append(f'"{element.decode(errors="backslashreplace")}"')
    return written
