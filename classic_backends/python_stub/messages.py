"""Messages between the server and the process of a Python model, as JSON behind a length of four bytes.

A message is `[kind, body, released]`: `kind` names the class of the body, a named tuple that travels as a list;
`released` are blocks of the receiver's `BlockWriter` that the sender has done with. Tensors lie in shared memory.
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 1 << 30

MAX_TEXT_BYTES = 1 << 16
"""The longest text of an error, or of what a model logs."""

MAX_UNREAD_ANSWERS = 64
"""Responses to one `Infer` that the server sends before the model has read any of them."""


class TensorMessage(NamedTuple):
    """One tensor, in a block of the sender's memory. `datatype` is the v2 protocol's name. BYTES lie there as all
    lengths, little-endian uint32, and then all contents."""

    name: str
    datatype: str
    shape: list[int]
    offset: int
    size: int


class RequestMessage(NamedTuple):
    """A request for a model to execute, or one that it makes itself."""

    handle: int
    """Names the request in later messages."""
    id: str
    correlation_id: int | str
    flags: int
    timeout: int
    """In microseconds."""
    priority: int
    parameters: str
    """A JSON object."""
    outputs: list[str]
    """The names of those that are requested."""
    inputs: list[TensorMessage]
    trace: str | None = None
    """A W3C trace context."""


class ErrorMessage(NamedTuple):
    """`code` is one of `TritonError`'s, by name."""

    code: str
    message: str


class ResponseMessage(NamedTuple):
    """One response, with outputs or with an error. `parameters` is a JSON object, or empty."""

    outputs: list[TensorMessage]
    error: ErrorMessage | None = None
    parameters: str = ""


class Initialize(NamedTuple):
    """The first message to a process: load `model_file` and make the model. `paths` are appended to `sys.path`; the
    first one is the version's directory. `arguments` are those of the model's `initialize`."""

    model_file: str
    paths: list[str]
    arguments: dict[str, str]
    decoupled: bool


class CompleteConfig(NamedTuple):
    """The first message to a process that only completes a config, given as JSON."""

    model_file: str
    paths: list[str]
    config: str


class Execute(NamedTuple):
    """Execute a batch; answered by `Executed`."""

    requests: list[RequestMessage]


class CancelRequest(NamedTuple):
    """The client of a request has left, or was told an error; if it is rescheduled, it does not come again."""

    handle: int


class HoldRequest(NamedTuple):
    """Responses to a request wait for their reader: send no more of them, until told otherwise."""

    handle: int
    held: bool


class CallAnswer(NamedTuple):
    """The result of a `Call`, as JSON, or why it failed."""

    call: int
    result: str = "null"
    error: str | None = None


class InferAnswer(NamedTuple):
    """A response to an `Infer`; none, and `final`, where it has no more."""

    call: int
    response: ResponseMessage | None
    final: bool


class CheckReady(NamedTuple):
    """Ask the model's `is_ready`; answered by `Checked`."""


class Release(NamedTuple):
    """Only carries the released blocks."""


class TrimMemory(NamedTuple):
    """Give back to the system what memory is free."""


class Finalize(NamedTuple):
    """The last message: finalize the model, and end."""


class Started(NamedTuple):
    """The process runs, and reads messages; its first one."""


class Initialized(NamedTuple):
    """The model can execute. `checks_ready`: it has an `is_ready`."""

    checks_ready: bool


class Failed(NamedTuple):
    """The model could not be loaded, or its config not be completed. `report`: the traceback."""

    message: str
    report: str


class CompletedConfig(NamedTuple):
    """The whole config, as JSON."""

    config: str


class Executed(NamedTuple):
    """`execute` has returned: a response for each request, None for those that are answered by `SendResponse`, or an
    error for all that have no answer yet. `rescheduled`: handles of those that come again, with a later batch and the
    same handle; a response of theirs has nothing but states."""

    responses: list[ResponseMessage | None]
    rescheduled: list[int]
    error: str | None = None


class SendResponse(NamedTuple):
    """A response that a sender sent; None where it only says that there are no more (`final`)."""

    handle: int
    response: ResponseMessage | None
    final: bool


class Reschedule(NamedTuple):
    """A request comes again, as a coroutine has said after `Executed`."""

    handle: int


class Infer(NamedTuple):
    """A request of the model to another one; answered by `InferAnswer`s. `request.handle` is not used. An empty
    `version` stands for the latest; `parent` is the handle of the request whose trace it belongs to, -1 for none."""

    call: int
    model: str
    version: str
    request: RequestMessage
    decoupled: bool
    parent: int = -1


class CancelInfer(NamedTuple):
    """The responses of an `Infer` are not needed. `answered`: they are read until the last one, which the called model
    or else the server sends; without it nobody reads any more."""

    call: int
    answered: bool


class AwaitAnswer(NamedTuple):
    """The current execution does not go on until the next response to an `Infer` is there; it has had `answers`."""

    call: int
    answers: int


class ReadAnswers(NamedTuple):
    """The model has read so many responses to an `Infer`: as many more may come."""

    call: int
    answers: int


class Call(NamedTuple):
    """A call of the server by name, with JSON arguments; answered by `CallAnswer`."""

    call: int
    method: str
    arguments: str


class UpdateMetric(NamedTuple):
    """`operation` is `increment`, `set` or `observe`."""

    metric: int
    operation: str
    value: float


class LogMessage(NamedTuple):
    """`level` is one of Python's numbers, `source` a file and line."""

    level: int
    text: str
    source: str


class Checked(NamedTuple):
    """The answer of `is_ready`: why the model is not ready, empty where it is."""

    unready_reason: str


def bounded_text(text: str) -> str:
    """A text of the model's that can be sent and logged: half characters are question marks, and what is too long is
    cut."""
    data = text.encode("utf-8", "replace")
    if len(data) <= MAX_TEXT_BYTES:
        return data.decode()
    return f"{data[:MAX_TEXT_BYTES].decode('utf-8', 'ignore')}... (cut after {MAX_TEXT_BYTES} of {len(data)} bytes)"


def frame(payload: bytes) -> bytes:
    """A message's JSON as it travels. Raises `ValueError` where it is too long."""
    if len(payload) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes is longer than {MAX_MESSAGE_BYTES}")
    return LENGTH.pack(len(payload)) + payload


class FrameReader:
    """Cuts what arrives of a stream of messages into whole ones."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """The messages that are complete with `data`."""
        self._buffer += data
        messages = []
        start = 0
        while len(self._buffer) - start >= LENGTH.size:
            [length] = LENGTH.unpack_from(self._buffer, start)
            end = start + LENGTH.size + length
            if end > len(self._buffer):
                break
            messages.append(bytes(self._buffer[start + LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return messages


def request_from_json(body: list[Any]) -> RequestMessage:
    """A request message out of the lists that JSON has for it."""
    message = RequestMessage(*body)
    return message._replace(inputs=[TensorMessage(*fields) for fields in message.inputs])


def response_from_json(body: list[Any] | None) -> ResponseMessage | None:
    """As `request_from_json`, for a response; None stays None."""
    if body is None:
        return None
    outputs, error, parameters = body
    tensors = [TensorMessage(*fields) for fields in outputs]
    return ResponseMessage(tensors, None if error is None else ErrorMessage(*error), parameters)
