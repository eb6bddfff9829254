"""The API's requests: those that the model is to answer, and those that it makes of other models."""

from __future__ import annotations

import asyncio
import queue
from contextlib import suppress
from typing import Any, Callable, Iterator, Sequence

from .connection import TritonModelException, server
from .messages import MAX_UNREAD_ANSWERS, ReadAnswers, RequestMessage, ResponseMessage
from .response import InferenceResponse, InferenceResponseSender, PendingRequest, parameters_json, response_from_message
from .tensor import Tensor, received_tensor, write_tensors

TRITONSERVER_REQUEST_RELEASE_ALL = 1
TRITONSERVER_REQUEST_RELEASE_RESCHEDULE = 2
TRITONSERVER_MEMORY_CPU = 0
TRITONSERVER_MEMORY_GPU = 2


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
        self._parameters = parameters_json(parameters)
        self._trace = trace or InferenceTrace()
        self._priority = 0
        self._pending: PendingRequest | None = None
        self._release_flags = TRITONSERVER_REQUEST_RELEASE_ALL

    @classmethod
    def _received(cls, message: RequestMessage, pending: PendingRequest) -> InferenceRequest:
        tensors = [received_tensor(each) for each in message.inputs]
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
                with suppress(RuntimeError):  # the loop is closed, and who waited is gone
                    loop.call_soon_threadsafe(settle)

        def settle() -> None:
            if not future.done():
                future.set_result(answers[0] if answers else InferenceResponse())

        call = self._send(decoupled, listen)
        future.add_done_callback(lambda done: server().cancel_infer(call) if done.cancelled() else None)
        return future

    def _send(self, decoupled: bool, listen: Callable[[InferenceResponse | None, bool], None]) -> int:
        if not self._model:
            raise TritonModelException("A model_name is needed to call another model.")
        fields = (self._id, self._correlation_id, self._flags, self._timeout, self._priority, self._parameters)
        message = RequestMessage(-1, *fields, self._outputs, write_tensors(self._inputs))
        version = "" if self._version == -1 else str(self._version)

        def on_answer(response: ResponseMessage | None, final: bool) -> None:
            listen(None if response is None else response_from_message(response), final)

        return server().infer(self._model, version, message, decoupled, self._trace._handle, on_answer)


class ResponseIterator:
    """The responses of a called model as they come. The last one may be empty: it only says that there are no more.

    The called model waits where many are unread; an iterator that is let go of cancels it.
    """

    def __init__(self, request: InferenceRequest, decoupled: bool) -> None:
        responses: queue.SimpleQueue[tuple[InferenceResponse | None, bool]] = queue.SimpleQueue()
        self._responses = responses
        self._ended = False
        self._read = 0
        # Who listens must not hold the iterator, or it would last as long as the call.
        self._call = request._send(decoupled, lambda response, final: responses.put((response, final)))

    def __iter__(self) -> Iterator[InferenceResponse]:
        return self

    def __next__(self) -> InferenceResponse:
        if self._ended:
            raise StopIteration
        response, self._ended = self._responses.get()
        self._read += 1
        if self._read == MAX_UNREAD_ANSWERS // 2 and not self._ended:
            server().send(ReadAnswers(self._call, self._read))
            self._read = 0
        return InferenceResponse() if response is None else response

    def _only(self) -> InferenceResponse:
        response, final = self._responses.get()
        while not final:
            _, final = self._responses.get()
        return InferenceResponse() if response is None else response

    def cancel(self) -> None:
        """Stop the called model; the iterator ends, and what it has not given is dropped."""
        server().cancel_infer(self._call)
        with suppress(queue.Empty):
            while True:
                self._responses.get_nowait()
        self._responses.put((None, True))

    def __del__(self) -> None:
        if not self._ended and hasattr(self, "_call"):
            with suppress(OSError):  # the connection is closed, and this process ends
                server().cancel_infer(self._call)
