"""How a received request is answered, once or many times."""

from __future__ import annotations

import asyncio
import threading
from typing import Sequence

from .connection import server
from .messages import ErrorMessage, ResponseMessage, SendResponse
from .response import InferenceResponse, response_to_message
from .triton_error import TritonModelException

TRITONSERVER_RESPONSE_COMPLETE_FINAL = 1


class PendingRequest:
    """A received request that is to be answered: `closed` once it has its last response. `rescheduled`: it waits for
    its next execution.

    Held by the request and its sender, and while it waits: where the model lets go of both, the client is told.
    """

    def __init__(self, handle: int, decoupled: bool) -> None:
        self.handle, self.decoupled = handle, decoupled
        self.closed = self.cancelled = self.answered = self.has_sender = self.rescheduled = False
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
                server().send(SendResponse(self.handle, error, True))
            except OSError:
                return  # the connection is closed, and this process ends


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
