"""The trace of a request, and trace files in tritonserver's format: a JSON array of events, with times in nanoseconds
of the monotonic clock. Tensors become text when they pass, since clients may overwrite shared memory."""

import errno
import json
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass, field
from itertools import accumulate, islice
from pathlib import Path
from typing import IO, Any, TypeAlias, cast

import numpy as np
from numpy.typing import NDArray

from ..core.errors import InvalidArgument
from ..core.gateway import ResponseStream
from ..core.request import InferResponse
from ..core.request_context import RequestContext
from ..core.tensor import Tensor
from ..processes.log_forwarding import FileOutage
from .trace_settings import TIMESTAMPS, TraceControl, TraceSettings

_BUFFER_BYTES = 1 << 16

_CLOSE_SECONDS = 1.0
"""The most seconds for reporting lost traces at the end."""


def check_trace_file(settings: TraceSettings) -> None:
    """Check that traces can be written, without opening a file.

    Raises:
        InvalidArgument: they cannot; the message names the flag.
    """
    if not settings.trace_file:
        return
    file = _path_of(settings, 0)
    if not os.path.isdir(file.parent):
        problem = f"there is no directory '{file.parent}'"
    elif os.path.isdir(file):
        problem = "it is a directory"
    elif not os.access(file if os.path.exists(file) else file.parent, os.W_OK):
        problem = "it may not be written"
    else:
        return
    raise InvalidArgument(f"--trace-config file={settings.trace_file}: {problem}")


def _path_of(settings: TraceSettings, number: int) -> Path:
    return Path(settings.trace_file + (f".{number}" if settings.numbers_files else ""))


class TraceFileWriter:
    """Called with every ended context; writes those that `traces` samples. `close` completes the last file."""

    def __init__(self, traces: TraceControl) -> None:
        self._traces = traces
        self._file: IO[bytes] | None = None
        self._path = Path()
        self._held = self._lost = 0
        self._numbered = False
        self._before = self._files = self._id = 0
        self._outage = FileOutage("traces")
        traces.on_change = self._flush

    def __call__(self, context: RequestContext) -> None:
        trace = None if context.parent is not None else request_trace(context, self._traces)
        if trace is None:
            return
        self._traces.open_traces -= 1
        try:
            self._write(trace, context)
        except OSError as error:
            self._lose(error, self._held + 1)

    def close(self) -> None:
        """Complete the open file, and report lost traces."""
        self._finish_file()
        self._outage.report_recovery(self._lost, _CLOSE_SECONDS)

    def _finish_file(self) -> None:
        if self._file is None:
            return
        self._flush()
        if not self._numbered:
            self._before = self._held
        self._forget()

    def _write(self, trace: "RequestTrace", context: RequestContext) -> None:
        settings = trace.settings
        if self._numbered is not settings.numbers_files:
            self._finish_file()
        if self._file is None:
            self._open(settings)
        assert self._file is not None
        objects = [json.dumps(entry, separators=(",", ":")).encode() for entry in self._objects(trace, context)]
        _check_not_removed(self._file)
        self._file.write((b"," if self._held else b"[") + b",".join(objects))
        self._held += 1
        over = not self._traces.settings(context.model).trace_count
        if 0 < settings.log_frequency <= self._held or (over and not self._traces.open_traces):
            self._finish_file()
        elif over:
            self._flush()

    def _objects(self, trace: "RequestTrace", context: RequestContext, parent: int = 0) -> Iterator[dict[str, object]]:
        """The objects of a request, and of those that its model made."""
        self._id += 1
        number = self._id
        yield from _trace_objects(number, parent, trace, context)
        for child in context.children or ():
            own = request_trace(child, self._traces)
            if own is not None:
                yield from self._objects(own, child, number)

    def _open(self, settings: TraceSettings) -> None:
        """Open a new file, or the one without a number where it was left."""
        self._numbered, self._path = settings.numbers_files, _path_of(settings, self._files)
        before = 0 if self._numbered else self._before
        self._file = self._path.open("r+b" if before else "wb", _BUFFER_BYTES)
        if before:
            self._file.seek(-1, os.SEEK_END)
        self._held = before
        self._files += self._numbered

    def _flush(self) -> None:
        """Complete the array so far; the next trace overwrites its end."""
        if self._file is None:
            return
        try:
            end = self._file.tell()
            self._file.write(b"]")
            self._file.flush()
            self._file.seek(end)
            _check_not_removed(self._file)
        except OSError as error:
            self._lose(error, self._held)
        else:
            self._outage.report_recovery(self._lost)
            self._lost = 0

    def _lose(self, error: OSError, count: int) -> None:
        """Give up a broken file, with all traces that it held; it will be written anew."""
        self._outage.report_failure(str(self._path), error)
        self._lost += count
        if not self._numbered:
            self._before = 0
        self._forget()

    def _forget(self) -> None:
        if self._file is not None:
            with suppress(OSError):  # of what it held and could not write, which is told
                self._file.close()
        self._file, self._held = None, 0


def _check_not_removed(file: IO[bytes]) -> None:
    """Raises `OSError` for a file that was removed while open."""
    if os.fstat(file.fileno()).st_nlink == 0:
        raise FileNotFoundError(errno.ENOENT, "it was removed")


def _trace_objects(
    number: int, parent: int, trace: "RequestTrace", context: RequestContext
) -> Iterator[dict[str, object]]:
    model = {"id": number, "model_name": context.model, "model_version": int(context.version or 0)}
    yield model | ({"request_id": context.id} if context.id else {}) | ({"parent_id": parent} if parent else {})
    if TIMESTAMPS in trace.settings.trace_level:
        yield {"id": number, "timestamps": [{"name": name, "ns": ns} for name, ns in _timestamps(context)]}
    executed = context.execution is not None or context.sequences
    for activity, tensors in (
        ("TENSOR_QUEUE_INPUT", trace.inputs.texts),
        ("TENSOR_BACKEND_INPUT", trace.inputs.texts if executed else ()),
        ("TENSOR_BACKEND_OUTPUT", trace.outputs.texts),
    ):
        yield from ({"id": number, "activity": activity, "tensor": tensor} for tensor in tensors)


_GRPC_ENDPOINTS = ("ModelInfer", "ModelStreamInfer")
_COMPUTE_EVENTS = ("COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END")


def _timestamps(context: RequestContext) -> Iterator[tuple[str, int]]:
    """The events of a request by Triton's names, in nanoseconds, without those that never happened."""
    grpc = context.endpoint in _GRPC_ENDPOINTS
    executed = context.execution
    summary = context.summary
    opened = min((sequence.opened for sequence in context.sequences), default=0.0)
    received = _ns(opened) if executed is None else executed.queued
    answered = summary.last or context.answered_at
    yield "GRPC_WAITREAD_START" if grpc else "HTTP_RECV_START", _ns(context.arrived_at)
    if received:
        yield "GRPC_WAITREAD_END" if grpc else "HTTP_RECV_END", received
    yield "REQUEST_START", received or _ns(context.arrived_at)
    if executed is not None:
        yield "QUEUE_START", executed.queued
        yield from zip(_COMPUTE_EVENTS, accumulate(executed.spent, initial=executed.begun), strict=True)
    generated = {
        "QUEUE_START": summary.submitted,
        "COMPUTE_START": summary.begun,
        "FIRST_RESPONSE": summary.first,
        "COMPUTE_END": summary.last,
    }
    yield from ((name, _ns(seconds)) for name, seconds in generated.items() if seconds is not None)
    yield "REQUEST_END", _ns(answered or context.ended_at)
    if answered:
        yield "INFER_RESPONSE_COMPLETE", _ns(answered)
        yield "GRPC_SEND_START" if grpc else "HTTP_SEND_START", _ns(answered)
    yield "GRPC_SEND_END" if grpc else "HTTP_SEND_END", _ns(context.ended_at)


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


TensorText: TypeAlias = dict[str, str]
"""A tensor's `name`, `data`, `shape` and `dtype` in tritonserver's form, elements and dims between commas."""

_MAX_ELEMENTS = 1 << 14
"""The most elements of a tensor that are written. The event loop waits about a microsecond for each."""

_MAX_STRING_BYTES = 1 << 18
"""The most bytes of a tensor's strings that are written."""

_MAX_CHARACTERS = 1 << 20
"""Characters of a request's inputs, or outputs, after which elements are left out."""

_MAX_TENSORS = 1024
"""The most tensors of a request's inputs, or outputs, since a stream may not end."""


@dataclass(slots=True)
class TracedTensors:
    """The tensors of one direction of a request as texts, up to the limits above."""

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
    """The trace of a request: the settings that apply, and its tensors if they ask for them."""

    settings: TraceSettings
    inputs: TracedTensors = field(default_factory=TracedTensors)
    outputs: TracedTensors = field(default_factory=TracedTensors)


def request_trace(context: RequestContext, traces: TraceControl) -> RequestTrace | None:
    """The trace of a request, if it is sampled, which the first call decides. A request without a model has none; one
    that a model made belongs to its parent's trace."""
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
    trace: RequestTrace, inputs: Iterable[Tensor], ask: Callable[[], AsyncIterator[InferResponse]]
) -> AsyncIterator[InferResponse]:
    """The answers of `ask` unchanged; if the settings say TENSORS, the trace records inputs and outputs."""
    if not trace.settings.records_tensors:
        return ask()
    trace.inputs.add(inputs)
    return _copy_outputs(trace.outputs, ask())


async def _copy_outputs(
    tensors: TracedTensors, answers: AsyncIterator[InferResponse]
) -> AsyncGenerator[InferResponse, None]:
    async with aclosing(cast("ResponseStream[InferResponse]", answers)) as stream:
        async for response in stream:
            tensors.add(response.outputs)
            yield response


def _tensor_text(tensor: Tensor) -> str:
    flat = tensor.data.reshape(-1)
    first = flat[:_MAX_ELEMENTS]
    elements = _string_texts(first) if tensor.datatype == "BYTES" else _number_texts(tensor.datatype, first)
    if len(elements) < len(flat):
        elements.append("...")
    return ",".join(elements)


def _number_texts(datatype: str, flat: NDArray[Any]) -> list[str]:
    """Floats in their shortest form; of FP32 eight digits."""
    if datatype == "BF16":
        flat = (flat.astype(np.uint32) << 16).view(np.float32)
    if datatype in ("FP16", "BF16", "FP32"):
        return [format(value, ".8g") for value in flat.tolist()]
    return [str(int(value)) if datatype == "BOOL" else str(value) for value in flat.tolist()]


def _string_texts(flat: NDArray[Any]) -> list[str]:
    """Strings in quotes, with escapes for bytes that are no text."""
    room = _MAX_STRING_BYTES
    texts = []
    for element in flat:
        room -= len(element)
        if room < 0:
            break
        texts.append(f'"{element.decode(errors="backslashreplace")}"')
    return texts
