"""`triton_python_backend_utils`, as a `model.py` imports it: tensors, requests, responses, senders, calls to other
models, logs and metrics.

The interface is that of https://github.com/triton-inference-server/python_backend#readme. A leading underscore, or no
place in `__all__`, marks what models should not use.
"""

from __future__ import annotations

import asyncio
import json
import logging
import queue
import struct
import sys
import threading
from pathlib import Path
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from . import dlpack
from .connection import CallFailed, ServerConnection
from .messages import ErrorMessage, LogMessage, RequestMessage, ResponseMessage, SendResponse, UpdateMetric
from .model_config import ModelConfig
from .tensor_memory import NUMPY_TYPES

__all__ = [
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITON_STRING_TO_NUMPY",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "Metric",
    "MetricFamily",
    "ModelConfig",
    "PreferredMemory",
    "ResponseIterator",
    "Tensor",
    "TritonError",
    "TritonModelException",
    "deserialize_bytes_tensor",
    "get_input_config_by_name",
    "get_input_tensor_by_name",
    "get_model_dir",
    "get_output_config_by_name",
    "get_output_tensor_by_name",
    "is_model_ready",
    "load_model",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "unload_model",
    "using_decoupled_model_transaction_policy",
]

TRITONSERVER_REQUEST_FLAG_SEQUENCE_START = 1
TRITONSERVER_REQUEST_FLAG_SEQUENCE_END = 2
TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1
TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2

TRITON_STRING_TO_NUMPY = {
    "TYPE_BOOL": bool,
    "TYPE_UINT8": np.uint8,
    "TYPE_UINT16": np.uint16,
    "TYPE_UINT32": np.uint32,
    "TYPE_UINT64": np.uint64,
    "TYPE_INT8": np.int8,
    "TYPE_INT16": np.int16,
    "TYPE_INT32": np.int32,
    "TYPE_INT64": np.int64,
    "TYPE_FP16": np.float16,
    "TYPE_FP32": np.float32,
    "TYPE_FP64": np.float64,
    "TYPE_STRING": np.object_,
}

_NUMBERS = {name: number for number, name in enumerate(NUMPY_TYPES, 1)}
"""Triton's numbers of datatypes; 0 is no type."""

_server: ServerConnection
_model_directory = ""


def connect(server: ServerConnection) -> None:
    """Set the connection that this module uses. Called once, before the model is imported."""
    global _server
    _server = server


def set_model_directory(directory: str) -> None:
    """Set what `get_model_dir` returns."""
    global _model_directory
    _model_directory = directory


class TritonModelException(Exception):
    """A call of this module failed."""


class TritonError:
    """Why a request failed, for the client. `code` decides about the HTTP and gRPC status."""

    UNKNOWN = 0
    INTERNAL = 1
    NOT_FOUND = 2
    INVALID_ARG = 3
    UNAVAILABLE = 4
    UNSUPPORTED = 5
    ALREADY_EXISTS = 6
    CANCELLED = 7

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        if code not in _ERROR_NAMES:
            raise TritonModelException(f"{code} is no code of TritonError")
        self._message, self._code = str(message), code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


_ERROR_NAMES = {number: name for name, number in vars(TritonError).items() if isinstance(number, int)}


class Tensor:
    """A named tensor. The constructor takes a numpy array: of `bytes` or text as objects for BYTES."""

    def __init__(self, name: str, numpy_array: np.ndarray[Any, Any]) -> None:
        array = np.asarray(numpy_array)
        if array.dtype.kind in "SU":
            array = array.astype(np.object_)
        datatype = "BYTES" if array.dtype.hasobject else _V2_NAMES.get(array.dtype)
        if datatype is None:
            raise TritonModelException(f"Tensor '{name}' has the type {array.dtype}, for which Triton has none.")
        if datatype == "BYTES":
            array = _to_bytes_objects(array)
        self._set(name, datatype, np.require(array, requirements="C"))

    def _set(self, name: str, datatype: str, array: np.ndarray[Any, Any]) -> Tensor:
        self._name, self._datatype, self._array = name, datatype, array
        return self

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray[Any, Any]:
        """The array, without a copy."""
        if self._datatype == "BF16":
            raise TritonModelException("Tensor of type BF16 cannot be converted to NumPy; use DLPack.")
        return self._array

    def triton_dtype(self) -> int:
        return _NUMBERS[self._datatype]

    def shape(self) -> list[int]:
        return list(self._array.shape)

    def is_cpu(self) -> bool:
        return True

    def to_dlpack(self) -> Any:
        """A capsule of the tensor's memory, without a copy."""
        if self._datatype == "BYTES":
            raise TritonModelException("DLPack does not have support for string tensors.")
        return dlpack.to_capsule(self._array, self._datatype == "BF16")

    def __dlpack__(self, *, stream: Any = None, **options: Any) -> Any:
        return self.to_dlpack()

    def __dlpack_device__(self) -> tuple[int, int]:
        return (dlpack.CPU, 0)

    @staticmethod
    def from_dlpack(name: str, tensor: Any) -> Tensor:
        """A tensor over another library's memory, without a copy unless that is a GPU's."""
        try:
            array, bfloat16 = dlpack.from_dlpack(tensor)
        except ValueError as error:
            raise TritonModelException(str(error)) from None
        datatype = "BF16" if bfloat16 else _V2_NAMES.get(array.dtype)
        if datatype is None:
            raise TritonModelException(f"Tensor '{name}' has the type {array.dtype}, for which Triton has none.")
        return Tensor.__new__(Tensor)._set(name, datatype, array)


_V2_NAMES = {dtype: name for name, dtype in NUMPY_TYPES.items() if name not in ("BF16", "BYTES")}


def _to_bytes_objects(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    items = [item if isinstance(item, bytes) else str(item).encode() for item in array.ravel().tolist()]
    objects = np.empty(len(items), np.object_)
    objects[:] = items
    return objects.reshape(array.shape)


class InferenceResponse:
    """The response to a request: output tensors, or an error; and parameters, a dict of bool, int and str."""

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: dict[str, Any] | str | None = None,
    ) -> None:
        for tensor in output_tensors:
            if not isinstance(tensor, Tensor):
                raise TritonModelException(f"An output must be a Tensor, found type '{type(tensor)}'.")
        self._outputs, self._error = list(output_tensors), error
        self._parameters = _parameters_json(parameters)

    def output_tensors(self) -> list[Tensor]:
        return self._outputs

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """A JSON object."""
        return self._parameters


def _parameters_json(parameters: dict[str, Any] | str | None) -> str:
    if parameters is None:
        return "{}"
    if isinstance(parameters, str):
        return parameters
    for name, value in parameters.items():
        if not isinstance(name, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type '{type(name)}'.")
        if not isinstance(value, (bool, int, str)):
            expected = "Expect parameters values to have type bool/int/str"
            raise TritonModelException(f"{expected}, found type '{type(value)}'.")
    return json.dumps(parameters)


class PreferredMemory:
    """Where a called model should leave its outputs. Accepted; they are left in the host's memory."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        if preferred_memory_type not in (TRITONSERVER_MEMORY_CPU, TRITONSERVER_MEMORY_GPU):
            raise TritonModelException(f"{preferred_memory_type} is no type of memory")


class InferenceTrace:
    """The trace of a request, to pass on."""

    def __init__(self, handle: int = -1, context: str | None = None) -> None:
        self._handle, self._context = handle, context

    def get_context(self) -> str | None:
        """The W3C trace context as JSON text, or None without a trace."""
        return self._context


class PendingRequest:
    """A received request that is to be answered: `closed` once it has its last response, or comes again.

    Held by the request and its sender: where the model lets go of both, the client is told.
    """

    def __init__(self, handle: int, decoupled: bool) -> None:
        self.handle, self.decoupled = handle, decoupled
        self.closed = self.cancelled = self.answered = self.has_sender = False
        self.lock = threading.Lock()
        self._may_send = threading.Event()
        self._may_send.set()

    def cancel(self) -> None:
        """Note that the client has left."""
        self.cancelled = True
        self._may_send.set()

    def hold(self, held: bool) -> None:
        """Let senders wait, or go on."""
        if held and not self.cancelled:
            self._may_send.clear()
        else:
            self._may_send.set()

    def wait_for_reader(self) -> None:
        """Return when the client has read enough of what was sent; in a coroutine at once, for others wait for it."""
        if not self._may_send.is_set() and asyncio._get_running_loop() is None:
            self._may_send.wait()

    def __del__(self) -> None:
        if not self.closed:
            text = "The model let go of the request without a final response."
            error = ResponseMessage([], ErrorMessage("INTERNAL", text))
            try:
                _server.send(SendResponse(self.handle, error, True))
            except OSError:
                return  # the connection is closed, and this process ends


class InferenceRequest:
    """A request: one that the model is to answer, or one that it makes of another model."""

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = (),
        requested_output_names: Sequence[str] = (),
        model_name: str = "",
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory | None = None,
        trace: InferenceTrace | None = None,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        for tensor in inputs:
            if not isinstance(tensor, Tensor):
                raise TritonModelException(f"An input must be a Tensor, found type '{type(tensor)}'.")
        self._id, self._correlation_id, self._flags, self._timeout = request_id, correlation_id, flags, timeout
        self._inputs, self._outputs = list(inputs), list(requested_output_names)
        self._model, self._version = model_name, model_version
        self._parameters = _parameters_json(parameters)
        self._trace = trace or InferenceTrace()
        self._priority = 0
        self._pending: PendingRequest | None = None
        self._release_flags = TRITONSERVER_REQUEST_RELEASE_ALL

    @classmethod
    def _received(cls, message: RequestMessage, pending: PendingRequest) -> InferenceRequest:
        tensors = [Tensor.__new__(Tensor)._set(t.name, t.datatype, _server.reader.read(t)) for t in message.inputs]
        request = cls(message.id, message.correlation_id, tensors, message.outputs, flags=message.flags)
        request._timeout, request._priority, request._parameters = message.timeout, message.priority, message.parameters
        request._trace = InferenceTrace(message.handle, message.trace)
        request._pending = pending
        return request

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def request_id(self) -> str:
        return self._id

    def correlation_id(self) -> int | str:
        return self._correlation_id

    def requested_output_names(self) -> list[str]:
        return self._outputs

    def model_name(self) -> str:
        return self._model

    def flags(self) -> int:
        return self._flags

    def set_flags(self, flags: int) -> None:
        self._flags = flags

    def timeout(self) -> int:
        """Microseconds, 0 for none."""
        return self._timeout

    def parameters(self) -> str:
        """A JSON object."""
        return self._parameters

    def trace(self) -> InferenceTrace:
        return self._trace

    def preferred_memory(self) -> PreferredMemory:
        return PreferredMemory(TRITONSERVER_MEMORY_CPU)

    def get_response_sender(self) -> InferenceResponseSender:
        pending = self._require_pending("get_response_sender")
        pending.has_sender = True
        return InferenceResponseSender(pending, self._outputs)

    def is_cancelled(self) -> bool:
        return self._require_pending("is_cancelled").cancelled

    def set_release_flags(self, flags: int) -> None:
        self._require_pending("set_release_flags")
        if flags not in (TRITONSERVER_REQUEST_RELEASE_ALL, TRITONSERVER_REQUEST_RELEASE_RESCHEDULE):
            raise TritonModelException(f"{flags} are no release flags")
        self._release_flags = flags

    def _require_pending(self, method: str) -> PendingRequest:
        if self._pending is None:
            raise TritonModelException(f"{method} is for requests that the model received.")
        return self._pending

    def exec(self, decoupled: bool = False) -> InferenceResponse | ResponseIterator:
        """The response of the called model or, with `decoupled`, an iterator of all its responses."""
        iterator = ResponseIterator(self, decoupled)
        return iterator if decoupled else iterator._only()

    def async_exec(self, decoupled: bool = False) -> Any:
        """As `exec`, to be awaited in an `async` function."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        if decoupled:
            future.set_result(ResponseIterator(self, True))
            return future
        answers: list[InferenceResponse] = []

        def listen(response: InferenceResponse | None, final: bool) -> None:
            if response is not None:
                answers.append(response)
            if final:
                loop.call_soon_threadsafe(settle)

        def settle() -> None:
            if not future.done():
                future.set_result(answers[0] if answers else InferenceResponse())

        cancel = self._send(decoupled, listen)
        future.add_done_callback(lambda done: cancel() if done.cancelled() else None)
        return future

    def _send(self, decoupled: bool, listen: Callable[[InferenceResponse | None, bool], None]) -> Callable[[], None]:
        if not self._model:
            raise TritonModelException("A model_name is needed to call another model.")
        tensors = [_server.writer.write(t._name, t._datatype, t._array) for t in self._inputs]
        message = RequestMessage(
            -1,
            self._id,
            self._correlation_id,
            self._flags,
            self._timeout,
            self._priority,
            self._parameters,
            self._outputs,
            tensors,
        )
        version = "" if self._version == -1 else str(self._version)

        def on_answer(response: ResponseMessage | None, final: bool) -> None:
            listen(None if response is None else _response_from_message(response), final)

        return _server.infer(self._model, version, message, decoupled, self._trace._handle, on_answer)


def _response_from_message(message: ResponseMessage) -> InferenceResponse:
    if message.error is not None:
        code = {name: number for number, name in _ERROR_NAMES.items()}.get(message.error.code, TritonError.UNKNOWN)
        return InferenceResponse(error=TritonError(message.error.message, code), parameters=message.parameters or None)
    tensors = [Tensor.__new__(Tensor)._set(t.name, t.datatype, _server.reader.read(t)) for t in message.outputs]
    return InferenceResponse(tensors, parameters=message.parameters or None)


class ResponseIterator:
    """The responses of a called model as they come. The last one may be empty: it only says that there are no more."""

    def __init__(self, request: InferenceRequest, decoupled: bool) -> None:
        self._responses: queue.SimpleQueue[tuple[InferenceResponse | None, bool]] = queue.SimpleQueue()
        self._ended = False
        self._cancel = request._send(decoupled, lambda response, final: self._responses.put((response, final)))

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        if self._ended:
            raise StopIteration
        response, self._ended = self._responses.get()
        return InferenceResponse() if response is None else response

    def _only(self) -> InferenceResponse:
        response, final = self._responses.get()
        while not final:
            _, final = self._responses.get()
        return InferenceResponse() if response is None else response

    def cancel(self) -> None:
        """Stop the called model; the iterator ends."""
        self._cancel()
        self._responses.put((None, True))

    def __del__(self) -> None:
        if not self._ended and hasattr(self, "_cancel"):
            self._cancel()


class InferenceResponseSender:
    """Sends the responses to one request, from any thread, also after `execute` has returned."""

    def __init__(self, pending: PendingRequest, requested: Sequence[str]) -> None:
        self._pending, self._requested = pending, requested

    def is_cancelled(self) -> bool:
        return self._pending.cancelled

    def send(self, response: InferenceResponse | None = None, flags: int = 0) -> None:
        """Send a response, say with `TRITONSERVER_RESPONSE_COMPLETE_FINAL` that it was the last, or both."""
        final = flags == TRITONSERVER_RESPONSE_COMPLETE_FINAL
        if flags and not final:
            raise TritonModelException("Unable to send response. Unsupported flag provided.")
        if response is None and not final:
            raise TritonModelException(
                "Inference Response object must be provided when the response flags is set to zero."
            )
        if response is not None and not isinstance(response, InferenceResponse):
            raise TritonModelException(f"Expected an 'InferenceResponse' object, found type '{type(response)}'.")
        pending = self._pending
        pending.wait_for_reader()
        with pending.lock:
            if pending.closed:
                raise TritonModelException("Unable to send response. Response sender has been closed.")
            if not pending.decoupled:
                if response is None and not pending.answered:
                    raise TritonModelException(
                        "Unable to send response. Non-decoupled model cannot send complete final before sending a "
                        "response."
                    )
                if response is not None and pending.answered:
                    raise TritonModelException(
                        "Unable to send response. Non-decoupled model cannot send more than one response."
                    )
            message = None if response is None else response_to_message(response, self._requested)
            pending.answered = pending.answered or response is not None
            pending.closed = final
            _server.send(SendResponse(pending.handle, message, final))


def response_to_message(response: InferenceResponse, requested: Sequence[str]) -> ResponseMessage:
    """A response as it travels: its tensors written, those that no one asked for dropped."""
    if response._error is not None:
        error = ErrorMessage(_ERROR_NAMES[response._error.code()], response._error.message())
        return ResponseMessage([], error, response._parameters)
    tensors = [
        _server.writer.write(tensor._name, tensor._datatype, tensor._array)
        for tensor in response._outputs
        if not requested or tensor._name in requested
    ]
    return ResponseMessage(tensors, None, response._parameters)


def get_input_tensor_by_name(inference_request: InferenceRequest, name: str) -> Tensor | None:
    return _find(inference_request.inputs(), name)


def get_output_tensor_by_name(inference_response: InferenceResponse, name: str) -> Tensor | None:
    if inference_response._error is not None:
        raise TritonModelException(inference_response._error.message())
    return _find(inference_response.output_tensors(), name)


def _find(tensors: Sequence[Tensor], name: str) -> Tensor | None:
    return next((tensor for tensor in tensors if tensor._name == name), None)


def get_input_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((each for each in model_config.get("input", ()) if each["name"] == name), None)


def get_output_config_by_name(model_config: dict[str, Any], name: str) -> dict[str, Any] | None:
    return next((each for each in model_config.get("output", ()) if each["name"] == name), None)


def using_decoupled_model_transaction_policy(model_config: dict[str, Any]) -> bool:
    return bool(model_config.get("model_transaction_policy", {}).get("decoupled", False))


def triton_to_numpy_type(data_type: int) -> Any:
    return NUMPY_TYPES[next(name for name, number in _NUMBERS.items() if number == data_type)].type


def numpy_to_triton_type(data_type: Any) -> int:
    dtype = np.dtype(data_type)
    return _NUMBERS["BYTES" if dtype.hasobject or dtype.kind == "S" else _V2_NAMES[dtype]]


def triton_string_to_numpy(triton_type_string: str) -> Any:
    return TRITON_STRING_TO_NUMPY[triton_type_string]


def serialize_byte_tensor(input_tensor: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The elements in row-major order, each behind its length of four bytes; as an array of one object."""
    if input_tensor.size == 0:
        return np.empty([0], dtype=np.object_)
    if not (input_tensor.dtype.hasobject or input_tensor.dtype.kind == "S"):
        raise TritonModelException("cannot serialize bytes tensor: invalid datatype")
    items = _to_bytes_objects(input_tensor).ravel().tolist()
    serialized = b"".join(struct.pack("<I", len(item)) + item for item in items)
    return np.asarray(serialized, dtype=np.object_)


def deserialize_bytes_tensor(encoded_tensor: bytes) -> np.ndarray[Any, Any]:
    """The elements of what `serialize_byte_tensor` made, as a flat array of objects."""
    items, offset = [], 0
    while offset < len(encoded_tensor):
        [length] = struct.unpack_from("<I", encoded_tensor, offset)
        offset += 4 + length
        items.append(bytes(encoded_tensor[offset - length : offset]))
    return np.array(items, dtype=np.object_)


def get_model_dir() -> str:
    """The directory of the model's version."""
    return _model_directory


def load_model(model_name: str, config: str = "", files: dict[str, bytes] | None = None) -> None:
    """Load a model of the server's repositories, where the server was started with explicit model control."""
    encoded = {path: content.hex() for path, content in (files or {}).items()}
    _call("load_model", name=model_name, config=config, files=encoded)


def unload_model(model_name: str, unload_dependents: bool = False) -> None:
    _call("unload_model", name=model_name, dependents=unload_dependents)


def is_model_ready(model_name: str, model_version: str = "") -> bool:
    return bool(_call("is_model_ready", name=model_name, version=str(model_version)))


def _call(method: str, **arguments: Any) -> Any:
    try:
        return _server.call(method, **arguments)
    except CallFailed as failure:
        raise TritonModelException(str(failure)) from None


class Logger:
    """Writes to the server's log."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3

    @staticmethod
    def log(message: str, level: int = INFO) -> None:
        _log(_LOG_LEVELS[level], message)

    @staticmethod
    def log_info(message: str) -> None:
        _log(logging.INFO, message)

    @staticmethod
    def log_warn(message: str) -> None:
        _log(logging.WARNING, message)

    @staticmethod
    def log_error(message: str) -> None:
        _log(logging.ERROR, message)

    @staticmethod
    def log_verbose(message: str) -> None:
        _log(logging.DEBUG, message)


_LOG_LEVELS = {
    Logger.INFO: logging.INFO,
    Logger.WARNING: logging.WARNING,
    Logger.ERROR: logging.ERROR,
    Logger.VERBOSE: logging.DEBUG,
}


def _log(level: int, message: str) -> None:
    caller = sys._getframe(2)
    source = f"{Path(caller.f_code.co_filename).name}:{caller.f_lineno}"
    _server.send(LogMessage(level, str(message), source))


class Metric:
    """One series of a family: `increment` of counters and gauges, `set` of gauges, `observe` of histograms."""

    def __init__(self, family: MetricFamily, labels: dict[str, str] | None, buckets: list[float] | None) -> None:
        self._family = family
        texts = {str(name): str(value) for name, value in (labels or {}).items()}
        self._id: int = _call("add_metric", family=family._name, labels=texts, buckets=buckets)

    def increment(self, value: float) -> None:
        self._require(MetricFamily.COUNTER, MetricFamily.GAUGE)
        if self._family._kind == MetricFamily.COUNTER and value < 0:
            raise TritonModelException("A counter cannot be incremented by a negative value.")
        self._update("increment", value)

    def set(self, value: float) -> None:
        self._require(MetricFamily.GAUGE)
        self._update("set", value)

    def observe(self, value: float) -> None:
        self._require(MetricFamily.HISTOGRAM)
        self._update("observe", value)

    def value(self) -> float:
        self._require(MetricFamily.COUNTER, MetricFamily.GAUGE)
        return float(_call("metric_value", metric=self._id))

    def _require(self, *kinds: int) -> None:
        if self._family._kind not in kinds:
            operation = sys._getframe(1).f_code.co_name
            raise TritonModelException(f"A {_KINDS[self._family._kind]} has no operation '{operation}'.")

    def _update(self, operation: str, value: float) -> None:
        _server.send(UpdateMetric(self._id, operation, float(value)))

    def __del__(self) -> None:
        if hasattr(self, "_id"):
            try:
                _server.send(UpdateMetric(self._id, "remove", 0.0))
            except OSError:
                return  # the connection is closed, and this process ends


class MetricFamily:
    """Metrics of one name; `Metric` makes the series. Families of one name and kind are one, in all models."""

    COUNTER = 0
    GAUGE = 1
    HISTOGRAM = 2

    def __init__(self, name: str, description: str, kind: int) -> None:
        if kind not in _KINDS:
            raise TritonModelException(f"{kind} is no kind of metric")
        self._name, self._kind = name, kind
        _call("add_metric_family", name=name, description=description, kind=_KINDS[kind])

    def Metric(self, labels: dict[str, str] | None = None, buckets: list[float] | None = None) -> Metric:
        return Metric(self, labels, buckets)


_KINDS = {MetricFamily.COUNTER: "counter", MetricFamily.GAUGE: "gauge", MetricFamily.HISTOGRAM: "histogram"}
