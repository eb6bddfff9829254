"""The API's requests: those that the model is to answer, and those that it makes of other models."""

from __future__ import annotations

import asyncio
import operator
import queue
import threading
from contextlib import suppress
from typing import Any, AsyncIterator, Callable, Iterator, Sequence, TypeVar

from .connection import ForkedProcessError, TritonError, TritonModelException, server
from .messages import MAX_UNREAD_ANSWERS, AwaitAnswer, ReadAnswers, RequestMessage, ResponseMessage
from .response import InferenceResponse, InferenceResponseSender, PendingRequest, parameters_json, response_from_message
from .tensor import Tensor, byte_size, received_tensor, write_tensors

TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2

_PATIENCE_SECONDS = 0.5
"""How long an answer may take before the server is told that the execution waits for it."""

_MAX_KEPT_ANSWERS, _MAX_KEPT_BYTES = 1024, 1 << 16
"""What a stream keeps that can be read once more."""

T = TypeVar("T")

_REQUIRED: Any = object()
"""Stands for an argument that was not given."""


def _wrong_argument(name: str, value: Any) -> TypeError:
    if value is _REQUIRED:
        return TypeError(f"InferenceRequest needs the argument '{name}'")
    return TypeError(f"the argument '{name}' of InferenceRequest cannot be of the type '{type(value).__name__}'")


def _require(kind: type[T], name: str, value: Any) -> T:
    if not isinstance(value, kind):
        raise _wrong_argument(name, value)
    return value


def _integer(name: str, value: Any) -> int:
    """Numpy's integers are some, too."""
    try:
        return operator.index(value)
    except TypeError:
        raise _wrong_argument(name, value) from None


class PreferredMemory:
    """Where a called model should leave its outputs. Accepted; they are left in the host's memory."""

    def __init__(self, preferred_memory_type: int, preferred_device_id: int = 0) -> None:
        if preferred_memory_type not in (TRITONSERVER_MEMORY_CPU, TRITONSERVER_MEMORY_GPU):
            raise TritonModelException(f"{preferred_memory_type} is no type of memory")


class InferenceTrace:
    """The trace of a request, to pass on."""

    def __init__(self, handle: int = -1, context: str | None = None) -> None:
        self._handle = handle
        self._context = context

    def get_context(self) -> str | None:
        """The W3C trace context as JSON text, or None without a trace."""
        return self._context


_ANY_MEMORY = PreferredMemory(TRITONSERVER_MEMORY_CPU)
_NO_TRACE = InferenceTrace()


class InferenceRequest:
    """A request: one that the model is to answer, or one that it makes of another model."""

    def __init__(
        self,
        request_id: str = "",
        correlation_id: int | str = 0,
        inputs: Sequence[Tensor] = _REQUIRED,
        requested_output_names: Sequence[str] = _REQUIRED,
        model_name: str = _REQUIRED,
        model_version: int = -1,
        flags: int = 0,
        timeout: int = 0,
        preferred_memory: PreferredMemory = _ANY_MEMORY,
        trace: InferenceTrace = _NO_TRACE,
        parameters: dict[str, Any] | None = None,
    ) -> None:
        for argument, value in (("inputs", inputs), ("requested_output_names", requested_output_names)):
            if not isinstance(value, (list, tuple)):
                raise _wrong_argument(argument, value)
        for tensor in inputs:
            if not isinstance(tensor, Tensor):
                raise TritonModelException(f"An input must be a Tensor, found type '{type(tensor)}'.")
        for name in requested_output_names:
            _require(str, "requested_output_names", name)
        self._id = _require(str, "request_id", request_id)
        self._model = _require(str, "model_name", model_name)
        if not isinstance(correlation_id, str):
            correlation_id = _integer("correlation_id", correlation_id)
        self._correlation_id = correlation_id
        self._version = _integer("model_version", model_version)
        self._flags = _integer("flags", flags)
        self._timeout = _integer("timeout", timeout)
        _require(PreferredMemory, "preferred_memory", preferred_memory)
        self._trace = _require(InferenceTrace, "trace", trace)
        self._inputs = list(inputs)
        self._outputs = list(requested_output_names)
        self._parameters = parameters_json(parameters)
        self._priority = 0
        self._pending: PendingRequest | None = None
        self._release_flags = TRITONSERVER_REQUEST_RELEASE_ALL

    @classmethod
    def _received(cls, message: RequestMessage, pending: PendingRequest) -> InferenceRequest:
        tensors = [received_tensor(tensor) for tensor in message.inputs]
        request = cls(message.id, message.correlation_id, tensors, message.outputs, "", flags=message.flags)
        request._timeout = message.timeout
        request._priority = message.priority
        request._parameters = message.parameters
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
        self._flags = _integer("flags", flags)

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
        """As `exec`, to be awaited in an `async` function; the request is made at once. An iterator comes with the
        first response."""
        loop = asyncio.get_running_loop()
        iterator = ResponseIterator(self, decoupled)
        return loop.create_task(iterator._begun() if decoupled else iterator._only_later())

    def _send(self, decoupled: bool, listen: Callable[[InferenceResponse | None, bool], None]) -> int:
        if not self._model:
            raise TritonModelException("A model_name is needed to call another model.")
        server().require_own_process()
        fields = (self._id, self._correlation_id, self._flags, self._timeout, self._priority, self._parameters)
        message = RequestMessage(-1, *fields, self._outputs, write_tensors(self._inputs))
        version = "" if self._version == -1 else str(self._version)

        def on_answer(response: ResponseMessage | None, final: bool) -> None:
            listen(None if response is None else response_from_message(response), final)

        return server().infer(self._model, version, message, decoupled, self._trace._handle, on_answer)


class _Answers:
    """The responses of a called model that are there and not read. Filled in the reading thread."""

    def __init__(self) -> None:
        self.queue: queue.SimpleQueue[tuple[InferenceResponse | None, bool]] = queue.SimpleQueue()
        """Each, and whether it is the last."""
        self._arrival: asyncio.Future[None] | None = None

    def put(self, response: InferenceResponse | None, final: bool) -> None:
        self.queue.put((response, final))
        arrival = self._arrival
        if arrival is not None:
            with suppress(RuntimeError):  # the loop is closed, and who waited is gone
                arrival.get_loop().call_soon_threadsafe(_settle, arrival)

    async def wait(self, seconds: float) -> bool:
        """Whether one is there, or comes in time."""
        self._arrival = asyncio.get_running_loop().create_future()
        if self.queue.empty():
            await asyncio.wait([self._arrival], timeout=seconds)
        self._arrival = None
        return not self.queue.empty()


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


class ResponseIterator:
    """The responses of a called model as they come, for `for` and `async for`. The last one may be empty: it only says
    that there are no more.

    The called model waits where many are unread; an iterator that is let go of cancels it. A short stream that was read
    can be iterated over once more.
    """

    def __init__(self, request: InferenceRequest, decoupled: bool) -> None:
        self._answers = _Answers()
        self._ended = False
        self._read = 0
        self._unreported = 0
        self._kept: list[InferenceResponse] = []
        self._kept_bytes = 0
        self._replayed: int | None = None
        # Who listens must not hold the iterator, or it would last as long as the call.
        try:
            self._call = request._send(decoupled, self._answers.put)
        except ForkedProcessError as error:
            self._call = -1
            self._answers.put(InferenceResponse(error=TritonError(str(error), TritonError.UNAVAILABLE)), True)

    def __iter__(self) -> Iterator[InferenceResponse]:
        """Begin again, where all was read and is still known."""
        if self._ended and self._replayed in (None, len(self._kept)) and self._read == len(self._kept):
            self._replayed = 0
        return self

    def __next__(self) -> InferenceResponse:
        if self._replayed is not None and self._replayed < len(self._kept):
            self._replayed += 1
            return self._kept[self._replayed - 1]
        if self._ended:
            raise StopIteration
        try:
            answer = self._answers.queue.get(timeout=_PATIENCE_SECONDS)
        except queue.Empty:
            if threading.get_ident() in server().execution_threads:
                server().send(AwaitAnswer(self._call, self._read))
            answer = self._answers.queue.get()
        return self._take(*answer)

    def __aiter__(self) -> AsyncIterator[InferenceResponse]:
        return self

    async def __anext__(self) -> InferenceResponse:
        if self._ended:
            raise StopAsyncIteration
        await self._wait()
        return self._take(*self._answers.queue.get())

    async def _wait(self) -> None:
        """Return when a response is there."""
        reported = False
        while not await self._answers.wait(_PATIENCE_SECONDS):
            if not reported and _is_awaited(asyncio.current_task(), server().execution):
                server().send(AwaitAnswer(self._call, self._read))
                reported = True

    def _take(self, response: InferenceResponse | None, final: bool) -> InferenceResponse:
        self._ended = final
        self._read += 1
        self._unreported += 1
        if self._unreported == MAX_UNREAD_ANSWERS // 2 and not final:
            server().send(ReadAnswers(self._call, self._unreported))
            self._unreported = 0
        response = InferenceResponse() if response is None else response
        self._kept_bytes += sum(byte_size(tensor._on_host()) for tensor in response._outputs)
        if self._read <= _MAX_KEPT_ANSWERS and self._kept_bytes <= _MAX_KEPT_BYTES:
            self._kept.append(response)
        else:
            self._kept.clear()
        return response

    def _only(self) -> InferenceResponse:
        response = next(self)
        while not self._ended:
            next(self)
        return response

    async def _only_later(self) -> InferenceResponse:
        response = await self.__anext__()
        while not self._ended:
            await self.__anext__()
        return response

    async def _begun(self) -> ResponseIterator:
        await self._wait()
        return self

    def cancel(self) -> None:
        """Ask the called model to end, which the last response tells; responses that it made before come first. Without
        effect when it has ended."""
        server().cancel_infer(self._call)

    def __del__(self) -> None:
        if not self._ended and hasattr(self, "_call"):
            with suppress(OSError):  # the connection is closed, and this process ends
                server().leave_infer(self._call)


def _is_awaited(task: Any, execution: Any) -> bool:
    """Whether an execution does nothing until a task has ended: it is the execution, which awaits the task, or a
    `gather` of it and others."""
    pending = [execution]
    while pending:
        waiting = pending.pop()
        if waiting is task:
            return task is not None
        awaited = (getattr(waiting, "_fut_waiter", None), *getattr(waiting, "_children", ()))
        pending += filter(None, awaited)
    return False
