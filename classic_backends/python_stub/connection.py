"""The model process's end of the connection to the server: sends messages, and gives answers to those who wait.

Beside it the API's errors.
"""

from __future__ import annotations

import asyncio
import ctypes
import json
import os
import queue
import signal
import socket
import threading
from itertools import count
from typing import Any, Callable, Optional

from . import messages
from .messages import Call, CancelInfer, Infer, RequestMessage, ResponseMessage, response_from_json
from .tensor_memory import BlockReader, BlockWriter


class TritonModelException(Exception):
    """A call of the API failed."""


class ForkedProcessError(TritonModelException, OSError):
    """A process that the model has forked called the API: only the model's own process is the server's."""


_NOT_OURS = "This process was forked by the model: only the model's own can ask the server."


class TritonError:
    """Why a request failed, for the client. `code` decides about the HTTP and gRPC status."""

    UNKNOWN, INTERNAL, NOT_FOUND, INVALID_ARG, UNAVAILABLE, UNSUPPORTED, ALREADY_EXISTS, CANCELLED = range(8)

    def __init__(self, message: str, code: int = INTERNAL) -> None:
        if message is None:
            raise TypeError("the message of a TritonError must be a str, not None")
        if code not in ERROR_NAMES:
            raise TritonModelException(f"{code} is no code of TritonError")
        self._message = str(message)
        self._code = code

    def message(self) -> str:
        return self._message

    def code(self) -> int:
        return self._code


ERROR_NAMES = {number: name for name, number in vars(TritonError).items() if isinstance(number, int)}


_libc = ctypes.CDLL(None)

_RELEASED_BLOCKS = 64
"""Released blocks that are told to the server by themselves, where no other message takes them along."""

InferListener = Callable[[Optional[ResponseMessage], bool], None]
"""Gets each response of an inference, and whether it is the last; in the reading thread."""


class ServerConnection:
    """Messages to and from the server. Any thread may send; one thread reads, and ends the process with the
    connection."""

    def __init__(self, connection: socket.socket, reader_descriptor: int, writer: BlockWriter) -> None:
        self._socket = connection
        self.serves = False
        """The server answers calls, for the model is to serve; else only its config is completed."""
        self.forked = False
        """This process is a copy that the model made with `os.fork`, and all of this is its parent's."""
        self.execution: asyncio.Task[Any] | None = None
        """The task of a coroutine that the model's current execution waits for."""
        self.execution_threads = {threading.get_ident()}
        """The threads in which a wait keeps the execution from going on."""
        self.reader = BlockReader(reader_descriptor, self._count_release)
        """Has the tensors that the server writes."""
        self.writer = writer
        """Takes the tensors for the server."""
        self.handlers: dict[str, Callable[..., None]] = {
            "Release": lambda: None,
            "TrimMemory": self._trim_memory,
            "CallAnswer": lambda call, *answer: self._calls.pop(call).put(answer),
            "InferAnswer": self._on_infer_answer,
        }
        """Called in the reading thread with the body of a message, by the name of its class."""
        # What is collected while a message is made may send one itself, in the same thread.
        self._send_lock = threading.RLock()
        self._serials = count()
        self._calls: dict[int, queue.SimpleQueue[Any]] = {}
        self._inferences: dict[int, InferListener] = {}
        self._release_wanted: queue.SimpleQueue[None] = queue.SimpleQueue()
        os.register_at_fork(after_in_child=self._leave_to_parent)

    def _leave_to_parent(self) -> None:
        """In a process that the model has forked: send nothing any more, and let the server see the parent's end."""
        self.forked = True
        self._send_lock = threading.RLock()
        self._socket.close()

    def require_own_process(self) -> None:
        """Raises `ForkedProcessError` in a process that the model has forked."""
        if self.forked:
            raise ForkedProcessError(_NOT_OURS)

    def start(self) -> None:
        """Begin to read."""
        threading.Thread(target=self._read, name="charonia-read", daemon=True).start()
        threading.Thread(target=self._send_releases, name="charonia-release", daemon=True).start()

    def send(self, body: Any) -> None:
        """Send a message: one of the named tuples of `messages`. Half characters in its texts become question marks.
        Raises `ForkedProcessError`."""
        self.require_own_process()
        kind = type(body).__name__
        with self._send_lock:
            text = json.dumps([kind, body, self.reader.take_released()], ensure_ascii=False)
            self._socket.sendall(messages.frame(text.encode("utf-8", "replace")))

    def call(self, method: str, **arguments: Any) -> Any:
        """The result of a function of the server. Raises `TritonModelException`."""
        self._require_serving(method)
        serial = next(self._serials)
        answer = self._calls[serial] = queue.SimpleQueue()
        self.send(Call(serial, method, json.dumps(arguments, ensure_ascii=False)))
        result, error = answer.get()
        if error is not None:
            raise TritonModelException(error)
        return json.loads(result)

    def infer(
        self, model: str, version: str, request: RequestMessage, decoupled: bool, parent: int, listener: InferListener
    ) -> int:
        """Ask another model. Returns the call's number. Raises as `call` does."""
        self._require_serving("exec")
        call = next(self._serials)
        self._inferences[call] = listener
        self.send(Infer(call, model, version, request, decoupled, parent))
        return call

    def _require_serving(self, method: str) -> None:
        if not self.serves:
            raise TritonModelException(f"{method} cannot be called while the model's config is completed")

    def cancel_infer(self, call: int) -> None:
        """Ask for the end of a request of another model, unless it has ended; its listener hears how it ends."""
        if call in self._inferences:
            self.send(CancelInfer(call, True))

    def leave_infer(self, call: int) -> None:
        """Cancel a request of another model, unless it has ended; its listener hears no more."""
        if self._inferences.pop(call, None) is not None:
            self.send(CancelInfer(call, False))

    def _on_infer_answer(self, call: int, response: list[Any] | None, final: bool) -> None:
        message = response_from_json(response)
        listener = self._inferences.pop(call, None) if final else self._inferences.get(call)
        if listener is not None:
            listener(message, final)
        elif message is not None:
            self.reader.discard(message.outputs)

    def _read(self) -> None:
        frames = messages.FrameReader()
        received = memoryview(bytearray(1 << 16))  # one for all: made anew each time they would tear the heap
        try:
            while True:
                length = self._socket.recv_into(received)
                if not length:
                    break
                for payload in frames.feed(received[:length]):
                    kind, body, released = json.loads(payload)
                    self.writer.release(released)
                    self.handlers[kind](*body)
        finally:
            # The server is gone, or this process is of no more use to it; nor are those that the model started.
            if os.getpgrp() == os.getpid():
                os.killpg(0, signal.SIGKILL)
            os._exit(1)

    def _trim_memory(self) -> None:
        self.writer.trim()
        if hasattr(_libc, "malloc_trim"):
            _libc.malloc_trim(0)

    def _count_release(self) -> None:
        if self.reader.released_count >= _RELEASED_BLOCKS:
            self._release_wanted.put(None)  # arrays may end anywhere: nothing here may need a lock

    def _send_releases(self) -> None:
        while True:
            self._release_wanted.get()
            if self.reader.released_count:
                self.send(messages.Release())


class _NoConnection:
    """The connection of a process that the model has spawned: raises `ForkedProcessError` for all that asks the
    server."""

    forked = True

    def __getattr__(self, name: str) -> Any:
        raise ForkedProcessError(_NOT_OURS)


_server: Any = _NoConnection()


def connect(connection: ServerConnection) -> None:
    """Set the connection that the API uses. Called once, before the model is imported."""
    global _server
    _server = connection


def server() -> ServerConnection:
    """The connection of this process."""
    return _server  # type: ignore[no-any-return]
