"""The API's responses and their senders: how a received request is answered, once or many times."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any, Sequence

from .connection import ERROR_NAMES, TritonError, TritonModelException, server
from .messages import ErrorMessage, ResponseMessage, SendResponse, bounded_text
from .tensor import Tensor, received_tensor, write_tensors


class InferenceResponse:
    """The response to a request: output tensors, or an error; and parameters, a dict of bool, int and str."""

    def __init__(
        self,
        output_tensors: Sequence[Tensor] = (),
        error: TritonError | None = None,
        parameters: dict[str, Any] | str | None = None,
    ) -> None:
        if output_tensors is None:
            raise TypeError("the output_tensors of an InferenceResponse must be a list, not None")
        if not (error is None or isinstance(error, TritonError)):
            raise TypeError(f"the error of an InferenceResponse must be a TritonError, not '{type(error).__name__}'")
        for tensor in output_tensors:
            if not isinstance(tensor, Tensor):
                raise TritonModelException(f"An output must be a Tensor, found type '{type(tensor)}'.")
        self._outputs = list(output_tensors)
        self._error = error
        self._parameters = parameters_json(parameters)

    def output_tensors(self) -> list[Tensor]:
        return self._outputs

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error

    def parameters(self) -> str:
        """A JSON object."""
        return self._parameters


def parameters_json(parameters: dict[str, Any] | str | None) -> str:
    if parameters is None:
        return "{}"
    if isinstance(parameters, str):
        return parameters
    if not isinstance(parameters, dict):
        raise TritonModelException(f"Expect dict, got {type(parameters)}")
    for name, value in parameters.items():
        if not isinstance(name, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(name)}")
        if not isinstance(value, (bool, int, str)):
            expected = "Expect parameters values to have type bool/int/str"
            raise TritonModelException(f"{expected}, found type {type(value)}")
    return json.dumps(parameters, ensure_ascii=False)


def response_from_message(message: ResponseMessage) -> InferenceResponse:
    if message.error is not None:
        code = {name: number for number, name in ERROR_NAMES.items()}.get(message.error.code, TritonError.UNKNOWN)
        return InferenceResponse(error=TritonError(message.error.message, code), parameters=message.parameters or None)
    tensors = [received_tensor(tensor) for tensor in message.outputs]
    return InferenceResponse(tensors, parameters=message.parameters or None)


def response_to_message(response: InferenceResponse, requested: Sequence[str]) -> ResponseMessage:
    """A response as it travels: its tensors written, those that no one asked for dropped."""
    if response._error is not None:
        error = ErrorMessage(ERROR_NAMES[response._error.code()], bounded_text(response._error.message()))
        return ResponseMessage([], error, response._parameters)
    wanted = (tensor for tensor in response._outputs if not requested or tensor._name in requested)
    return ResponseMessage(write_tensors(wanted), None, response._parameters)


TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class PendingRequest:
    """A received request that is to be answered: `closed` once it has its last response. `rescheduled`: it waits for
    its next execution.

    Held by the request and its sender, and while it waits: where the model lets go of both, the client is told.
    """

    def __init__(self, handle: int, decoupled: bool) -> None:
        self.handle = handle
        self.decoupled = decoupled
        self.closed = False
        self.cancelled = False
        self.answered = False
        self.has_sender = False
        self.rescheduled = False
        self.lock = threading.Lock()
        self._may_send = threading.Event()
        self._may_send.set()

    def cancel(self) -> None:
        """Note that the client has left."""
        self.cancelled = True
        self._may_send.set()

    def hold(self, held: bool) -> None:
        """Let senders wait, or go on."""
        if held:
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
                server().send(SendResponse(self.handle, error, True))
            except OSError:
                return  # the connection is closed, and this process ends


class InferenceResponseSender:
    """Sends the responses to one request, from any thread, also after `execute` has returned."""

    def __init__(self, pending: PendingRequest, requested: Sequence[str]) -> None:
        self._pending = pending
        self._requested = requested

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
            if final and pending.rescheduled:
                raise TritonModelException("Unable to send response. The request is rescheduled: this is not its last.")
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
            server().send(SendResponse(pending.handle, message, final))
