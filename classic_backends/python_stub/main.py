"""The life of a Python model's process: load `model.py`, execute batches, finalize.

`execute` runs in the main thread, as user code expects; coroutines run in an event loop of their own, for as long as
the process lives.
"""

from __future__ import annotations

import asyncio
import atexit
import inspect
import json
import os
import queue
import signal
import socket
import sys
import threading
import traceback
import weakref
from concurrent import futures
from pathlib import Path
from typing import Any, Iterable

from . import backend_utils, messages, spawned
from .connection import ForkedProcessError, ServerConnection, TritonModelException, connect
from .messages import ErrorMessage, Executed, RequestMessage, ResponseMessage, bounded_text, request_from_json
from .model_file import complete_config, load_class
from .request import TRITONSERVER_REQUEST_RELEASE_RESCHEDULE, InferenceRequest
from .response import InferenceResponse, PendingRequest, response_to_message
from .tensor_memory import BlockWriter

_EXPECTED_NONE = "Expected a None object in the execute function return list for reschduled request, found type"
_EXPECTED_RESPONSE = "Expected an 'InferenceResponse' object in the execute function return list, found type"


def main() -> None:
    """Serve one instance of a model until the server says `Finalize` or hangs up.

    The arguments are four descriptors (a socket, the memory to read from, the memory to write to, one for standard
    output and error) and two sizes of the memory to write to: at the start, and by which it grows.
    """
    connection_descriptor, reader, writer, output, size, growth = map(int, sys.argv[1:7])
    sys.argv[:] = [""]  # as where Python is embedded
    stop_signals = (signal.SIGINT, signal.SIGTERM)
    for number in stop_signals:
        # The server decides what they mean. Not ignored: so they would be in all that the model starts.
        signal.signal(number, lambda *_: None)
    _obey_signals_in_copies(stop_signals)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, stop_signals)
    for standard in (1, 2):
        os.dup2(output, standard)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    connection = ServerConnection(
        socket.socket(fileno=connection_descriptor), reader, BlockWriter(writer, size, growth)
    )
    connect(connection)
    for name in spawned.API_MODULES:
        sys.modules[name] = backend_utils
    sys.modules["__main__"].__file__ = spawned.__file__  # what `multiprocessing` runs first where it spawns
    try:
        code = StubInstance(connection).serve()
        atexit._run_exitfuncs()
    except BaseException as error:
        if not connection.forked:
            raise
        code = _exit_code(error)  # the model has forked, and did not end the copy itself
    sys.stdout.flush()
    os._exit(code)  # whatever threads of the model's own still run


def _obey_signals_in_copies(numbers: Iterable[signal.Signals]) -> None:
    """Let processes that the model forks end by these signals, as `multiprocessing` ends its workers. One that comes
    before they are ready for it waits."""

    def obey() -> None:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)

    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, numbers),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers),
        after_in_child=obey,
    )


def _exit_code(error: BaseException) -> int:
    """The exit code of a copy of this process that ends with an error, or by an attempt to answer in its parent's
    place."""
    if isinstance(error, SystemExit):
        return error.code if isinstance(error.code, int) else int(error.code is not None)
    if isinstance(error, ForkedProcessError):
        return 0
    traceback.print_exception(type(error), error, error.__traceback__)
    return 1


class _Batch:
    """Requests to execute together, and what is known of their answers."""

    def __init__(self, requests: list[RequestMessage], pending: list[PendingRequest]) -> None:
        self.requests = requests
        self.pending = pending

    def take_requests(self) -> list[InferenceRequest]:
        """The requests as the model sees them, once."""
        requests = self.requests
        self.requests = []
        return [InferenceRequest._received(message, pending) for message, pending in zip(requests, self.pending)]

    def close(self) -> list[PendingRequest]:
        """Close what is not answered, and return it."""
        left = [pending for pending in self.pending if not pending.closed]
        for pending in left:
            pending.closed = True
        return left


class StubInstance:
    """One instance of the model. What the server asks arrives in `_inbox`, from the thread that reads."""

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection
        self._inbox: queue.SimpleQueue[_Batch | messages.Initialize | messages.CompleteConfig | None]
        self._inbox = queue.SimpleQueue()
        self._pending: weakref.WeakValueDictionary[int, PendingRequest] = weakref.WeakValueDictionary()
        self._rescheduled: dict[int, PendingRequest] = {}
        self._model: Any = None
        self._arguments: dict[str, str] = {}
        self._decoupled = False
        self._state_outputs: set[str] = set()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._tasks: set[asyncio.Future[None]] = set()
        connection.handlers.update(
            Initialize=lambda *body: self._inbox.put(messages.Initialize(*body)),
            CompleteConfig=lambda *body: self._inbox.put(messages.CompleteConfig(*body)),
            Execute=self._add_batch,
            Finalize=lambda: self._inbox.put(None),
            CancelRequest=self._cancel,
            HoldRequest=self._hold,
            CheckReady=lambda: threading.Thread(target=self._answer_ready, name="charonia-ready", daemon=True).start(),
        )

    def serve(self) -> int:
        """Do what the server says until `Finalize`; returns the exit code."""
        self._connection.start()
        self._connection.send(messages.Started())
        while True:
            message = self._inbox.get()
            if message is None:
                return self._finalize()
            if isinstance(message, _Batch):
                self._connection.send(self._execute(message))
                del message  # what the model let go of is noticed now
                continue
            try:
                if isinstance(message, messages.Initialize):
                    self._connection.serves = True
                    self._initialize(message)
                    self._connection.send(messages.Initialized(hasattr(self._model, "is_ready")))
                else:
                    self._connection.send(messages.CompletedConfig(complete_config(message)))
            except BaseException as error:
                if self._connection.forked:
                    raise
                report = bounded_text(traceback.format_exc())
                self._connection.send(messages.Failed(_describe(error), report))

    def _initialize(self, message: messages.Initialize) -> None:
        self._decoupled = message.decoupled
        self._arguments = message.arguments
        states = json.loads(message.arguments["model_config"]).get("sequence_batching", {}).get("state", [])
        self._state_outputs = {state["output_name"] for state in states}
        backend_utils.set_model_directory(message.paths[0])
        model = load_class(message.model_file, message.paths)()
        if not hasattr(model, "execute"):
            raise AttributeError(f"class TritonPythonModel of '{message.model_file}' has no function 'execute'")
        if hasattr(model, "initialize"):
            model.initialize(message.arguments)
        self._model = model

    def _finalize(self) -> int:
        try:
            if hasattr(self._model, "finalize"):
                self._model.finalize()
        except BaseException:
            traceback.print_exc()
            return 1
        return 0

    def _add_batch(self, requests: list[list[Any]]) -> None:
        received = [request_from_json(request) for request in requests]
        handles = [request.handle for request in received]
        pending = [
            self._rescheduled.pop(handle) if handle in self._rescheduled else PendingRequest(handle, self._decoupled)
            for handle in handles
        ]
        for request in pending:
            request.rescheduled = False
        self._pending.update(zip(handles, pending))
        self._inbox.put(_Batch(received, pending))

    def _cancel(self, handle: int) -> None:
        pending = self._pending.get(handle)
        if pending is not None:
            pending.cancel()
            pending.closed = pending.closed or self._rescheduled.pop(handle, None) is not None

    def _hold(self, handle: int, held: bool) -> None:
        pending = self._pending.get(handle)
        if pending is not None:
            pending.hold(held)

    def _execute(self, batch: _Batch) -> Executed:
        try:
            requests = batch.take_requests()
            result = self._model.execute(requests)
            if inspect.isawaitable(result) and self._decoupled:
                asyncio.run_coroutine_threadsafe(self._finish_later(result, requests, batch), self._event_loop())
                return Executed([None] * len(requests), [])
            if inspect.isawaitable(result):
                result = asyncio.run_coroutine_threadsafe(self._await_execution(result), self._event_loop()).result()
            return self._read_result(result, requests, batch)
        except BaseException as error:
            if self._connection.forked:
                raise
            traceback.print_exc()
            batch.close()
            return Executed([], [], self._failure_text(error))

    async def _await_execution(self, execution: Any) -> Any:
        self._connection.execution = asyncio.current_task()
        try:
            return await execution
        finally:
            self._connection.execution = None

    async def _finish_later(self, result: Any, requests: list[InferenceRequest], batch: _Batch) -> None:
        """Wait for what an `async` function of a decoupled model still does after `Executed` was sent."""
        try:
            self._check_decoupled_result(await result)
            for handle in self._reschedule(requests, batch):
                self._connection.send(messages.Reschedule(handle))
        except BaseException as error:
            traceback.print_exc()
            message = ResponseMessage([], ErrorMessage("INTERNAL", self._failure_text(error)))
            for pending in batch.close():
                self._connection.send(messages.SendResponse(pending.handle, message, True))

    def _read_result(self, result: Any, requests: list[InferenceRequest], batch: _Batch) -> Executed:
        """The result of `execute`, checked and written."""
        if self._decoupled:
            self._check_decoupled_result(result)
        if result is None:
            result = [None] * len(requests)
        elif not isinstance(result, list):
            raise TritonModelException(f"Expected a list in the execute return, found type '{type(result).__name__}'.")
        if len(result) != len(requests):
            raise TritonModelException(
                "Number of InferenceResponse objects do not match the number of InferenceRequest objects. "
                f"InferenceRequest(s) size is:{len(requests)}, and InferenceResponse(s) size is:{len(result)}"
            )
        for response, request, pending in zip(result, requests, batch.pending):
            rescheduled = request._release_flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
            if response is None and (self._decoupled or rescheduled or pending.has_sender):
                continue
            if rescheduled and not self._is_state(response):
                raise TritonModelException(f"{_EXPECTED_NONE} '{type(response).__name__}'.")
            if not isinstance(response, InferenceResponse):
                raise TritonModelException(f"{_EXPECTED_RESPONSE} '{type(response).__name__}'.")
            if pending.has_sender and pending.answered:
                raise TritonModelException(
                    "Unable to send response. Non-decoupled model cannot send more than one response."
                )
        written: list[ResponseMessage | None] = []
        try:
            for response, request in zip(result, requests):
                written.append(None if response is None else response_to_message(response, request._outputs))
            rescheduled_handles = self._reschedule(requests, batch)
        except BaseException:
            self._connection.writer.release(
                tensor.offset for message in written if message for tensor in message.outputs
            )
            raise
        for response, pending in zip(result, batch.pending):
            pending.closed = pending.closed or (response is not None and not pending.rescheduled)
        return Executed(written, rescheduled_handles)

    def _reschedule(self, requests: list[InferenceRequest], batch: _Batch) -> list[int]:
        """The handles of the requests that are to come again."""
        again = [
            pending
            for request, pending in zip(requests, batch.pending)
            if request._release_flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
        ]
        if any(pending.closed or (pending.answered and not self._decoupled) for pending in again):
            raise TritonModelException("A request that was answered cannot be rescheduled.")
        for pending in again:
            pending.rescheduled = True
            self._rescheduled[pending.handle] = pending
        return [pending.handle for pending in again]

    def _is_state(self, response: Any) -> bool:
        """Whether a response brings the server a sequence's states, and the client nothing."""
        if not isinstance(response, InferenceResponse) or response.has_error():
            return False
        return {tensor.name() for tensor in response.output_tensors()} <= self._state_outputs

    def _check_decoupled_result(self, result: Any) -> None:
        if result is not None:
            name = self._arguments["model_instance_name"]
            raise TritonModelException(
                f"Python model '{name}' is using the decoupled mode and the execute function must return None."
            )

    def _failure_text(self, error: BaseException) -> str:
        name = self._arguments["model_instance_name"]
        return f"Failed to process the request(s) for model instance '{name}', message: {_describe(error)}"

    def _answer_ready(self) -> None:
        try:
            ready = self._model.is_ready()
            if inspect.isawaitable(ready):
                ready = asyncio.run(_await(ready))
            if not isinstance(ready, bool):
                raise TypeError(f"is_ready must return a bool, not '{type(ready).__name__}'")
            reason = "" if ready else "is_ready returned False"
        except BaseException as error:
            reason = _describe(error)
        self._connection.send(messages.Checked(reason))

    def _event_loop(self) -> asyncio.AbstractEventLoop:
        """The loop of the model's coroutines, in a thread of its own."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            thread = threading.Thread(target=self._run_loop, args=(self._loop,), name="charonia-async", daemon=True)
            thread.start()
        return self._loop

    def _run_loop(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._decoupled:
            self._connection.execution_threads.add(threading.get_ident())
        thread = threading.current_thread()

        def end_copy() -> None:
            # A coroutine has forked: what it left of this loop would take its parent's events.
            if threading.current_thread() is thread:
                loop.call_soon(os._exit, 0)

        os.register_at_fork(after_in_child=end_copy)
        loop.run_forever()


async def _await(awaitable: Any) -> Any:
    return await awaitable


def _describe(error: BaseException) -> str:
    """An error as Triton tells it: its type and text, and where in the user's code it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    own = (str(Path(__file__).parent), str(Path(futures.__file__).parent))
    foreign = [frame for frame in frames if not frame.filename.startswith(own)]
    places = [f"  {frame.filename}({frame.lineno}): {frame.name}" for frame in foreign]
    where = "\n\nAt:\n" + "\n".join(reversed(places)) + "\n" if places else ""
    try:
        text = str(error)
    except BaseException:
        text = "(its text cannot be made)"
    # Triton's own errors have no place, and then no type.
    own_error = isinstance(error, TritonModelException) and not places
    return bounded_text(text if own_error else f"{type(error).__name__}: {text}") + where
