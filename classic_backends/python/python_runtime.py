"""The runtime of one instance of a Python model: hands requests to its process, and responses to their readers.

`execute_requests` is called in the instance's thread; what the process sends arrives in the event loop.
"""

import asyncio
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from itertools import count
from typing import Any

from ...core.errors import LONGEST_REPORT, Internal, InvalidArgument
from ...core.request_context import RequestContext
from ...core.runtime import (
    LoadInterruption,
    Rescheduled,
    Runtime,
    RuntimeAnswer,
    RuntimeRequest,
    RuntimeResponse,
    RuntimeTraits,
)
from ...core.wait_graph import AwaitedCall
from ...telemetry.trace_settings import TraceControl
from ...telemetry.tracing import trace_context
from ..python_stub import messages
from .model_calls import ModelCalls, error_from_message
from .stub_process import StubProcess, escape_controls

log = logging.getLogger(__name__)

_LEAVE_SECONDS = 30.0
"""How long a model may take to finalize, before its process is killed."""

_CHECK_SECONDS = 5.0
"""How long a model's `is_ready` may take."""

_ENDED = "its process ended unexpectedly"

_ANSWERS = (messages.Initialized, messages.CompletedConfig, messages.Failed)
_ABANDONED = messages.Failed("the model was unloaded meanwhile, or the server stops", "")


def initialize_failure(instance: str) -> str:
    return f"Failed to initialize model instance '{instance}'"


class FirstAnswer:
    """A `StubListener` that waits for the answer to the first message to a process, in any thread. `name`: stands
    before what that logs; `failure`: begins the errors. The model's own code answers, so only the start of the process
    has a limit."""

    def __init__(self, name: str, failure: str) -> None:
        self._name = name
        self._failure = failure
        self._lock = threading.Lock()
        self._started = threading.Event()
        self._answer: Any = None
        self._answered = threading.Event()

    def on_message(self, message: Any) -> None:
        if isinstance(message, messages.LogMessage):
            for line in message.text.splitlines() or [""]:
                log.log(message.level, "%s: %s: %s", self._name, message.source, escape_controls(line))
        elif isinstance(message, messages.Started):
            self._started.set()
        elif isinstance(message, _ANSWERS):
            self._set_answer(message)

    def on_end(self, how: str) -> None:
        self.on_message(messages.Failed(f"{_ENDED}: {how}", ""))

    def abandon(self) -> None:
        """Let who waits know that nobody needs the answer; from any thread."""
        self._set_answer(_ABANDONED)

    def _set_answer(self, message: Any) -> None:
        """The first one counts."""
        with self._lock:
            if not self._answered.is_set():
                self._answer = message
                self._answered.set()
        self._started.set()

    def wait(self, start_seconds: float) -> Any:
        """The message, however late. `start_seconds`: how long the process may take to start.

        Raises:
            InvalidArgument: the process reports a failure, has ended, does not start, or nobody needs it any more.
        """
        if not self._started.wait(start_seconds):
            text = f"its process did not start within {start_seconds:g} s (stub-timeout-seconds)"
            self._set_answer(messages.Failed(text, ""))
        self._answered.wait()
        message = self._answer
        if isinstance(message, messages.Failed):
            if message.report:
                report = "\n".join(map(escape_controls, message.report.splitlines()))
                log.error("%s: %s", self._failure, report)
            raise InvalidArgument(f"{self._failure}: {message.message}")
        return message


class PythonRuntime(Runtime):
    """One instance. `name` is the instance's; `datatypes` are the v2 names of the model's inputs; `loop` and `traces`
    are the server's. The process knows a request by its handle, from its first execution until it is answered or
    dropped."""

    def __init__(
        self, name: str, datatypes: Mapping[str, str], loop: asyncio.AbstractEventLoop, traces: TraceControl
    ) -> None:
        self._name = name
        self._datatypes = datatypes
        self._loop = loop
        self._traces = traces
        self._first = FirstAnswer(name, initialize_failure(name))
        self._new_handles = count(1)
        self._open: dict[int, RuntimeRequest] = {}
        self._handles: dict[RuntimeRequest, int] = {}
        self._waiting: set[int] = set()
        """The handles of requests that are rescheduled, and not executed again yet."""
        self._executed: Future[messages.Executed | None] = Future()
        self._executing = False
        self._kill_reason = ""
        self._readiness: asyncio.Future[str] | None = None
        self.resources = ExitStack()
        """Closed with it."""

    def start(
        self,
        process: StubProcess,
        calls: ModelCalls,
        message: messages.Initialize,
        start_seconds: float,
        interruption: LoadInterruption,
    ) -> None:
        """Load the model in a process that was made with this object as its listener, and starts within
        `start_seconds`.

        Raises:
            InvalidArgument: the model cannot be loaded, or nobody waits for it any more.
        """
        self._process = process
        self._calls = calls
        asyncio.run_coroutine_threadsafe(process.connect(), self._loop).result()
        try:
            process.send(message)
            with interruption.calls(self._first.abandon):
                initialized = self._first.wait(start_seconds)
        except BaseException:
            process.kill()  # it may hang, and has no model to finalize
            self.close()
            raise
        check = self._unready_reason if initialized.checks_ready else None
        self.traits = RuntimeTraits(ragged=True, process=process, interrupt=self._interrupt, unready_reason=check)

    def execute_requests(self, requests: Sequence[RuntimeRequest]) -> Sequence[RuntimeAnswer]:
        handles = [self._handles.get(request) or next(self._new_handles) for request in requests]
        batch: list[messages.RequestMessage] = []
        try:
            batch.extend(map(self._write, handles, requests))
        except BaseException:  # there is no memory for them all
            self._process.writer.release(tensor.offset for written in batch for tensor in written.inputs)
            raise
        self._waiting.difference_update(handles)
        self._open.update(zip(handles, requests, strict=True))
        self._handles.update(zip(requests, handles, strict=True))
        self._executed = Future()
        if self._process.lost:
            raise self._end_error()
        self._executing = True
        self._process.send(messages.Execute(batch))
        for request in requests:
            if request.cancelled:
                self.cancel_request(request)
        executed = self._executed.result()
        self._executing = False
        if executed is None:  # an error of the future's would hold this frame, and be held by it
            raise self._end_error()
        self._waiting.update(executed.rescheduled)
        answers = []
        for handle, response in zip(handles, executed.responses or [None] * len(handles), strict=True):
            answers.append(self._read(response, handle in executed.rescheduled))
            if (answers[-1] is not None and handle not in self._waiting) or executed.error is not None:
                self._forget(handle)
        if executed.error is not None:
            raise Internal(executed.error, longest=LONGEST_REPORT)
        return answers

    def cancel_request(self, request: RuntimeRequest) -> None:
        handle = self._handles.get(request)
        if handle is None:
            return
        self._process.send(messages.CancelRequest(handle))
        if handle in self._waiting:
            self._forget(handle)

    def awaited_calls(self) -> Sequence[AwaitedCall]:
        return self._calls.awaited() if self._executing else ()

    def hold_request(self, request: RuntimeRequest, held: bool) -> None:
        handle = self._handles.get(request)
        if handle is not None:
            self._process.send(messages.HoldRequest(handle, held))

    def _forget(self, handle: int) -> None:
        self._waiting.discard(handle)
        request = self._open.pop(handle, None)
        if request is not None:
            self._handles.pop(request, None)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._process.close(_LEAVE_SECONDS), self._loop).result()
        self.resources.close()

    def _write(self, handle: int, request: RuntimeRequest) -> messages.RequestMessage:
        tensors = ((name, self._datatypes[name], array) for name, array in request.inputs.items())
        return messages.RequestMessage(
            handle,
            request.id,
            request.correlation_id,
            request.flags,
            request.timeout,
            request.priority,
            json.dumps(dict(request.parameters)) if request.parameters else "{}",
            list(request.output_names),
            self._process.writer.write_all(tensors),
            trace_context(request.context, self._traces),
        )

    def _read(self, message: messages.ResponseMessage | None, rescheduled: bool = False) -> RuntimeAnswer:
        if message is None:
            return Rescheduled() if rescheduled else None
        if message.error is not None:
            return error_from_message(message.error)
        outputs = {tensor.name: self._process.reader.read(tensor) for tensor in message.outputs}
        if rescheduled:
            return Rescheduled(outputs)
        return RuntimeResponse(outputs, json.loads(message.parameters) if message.parameters not in ("", "{}") else {})

    def _interrupt(self, reason: str) -> None:
        self._kill_reason = reason
        self._process.kill()

    def _end_error(self) -> Internal:
        if self._kill_reason:
            text = f"its process was ended: {self._kill_reason}"
            return Internal(f"Failed to process the request(s) for model instance '{self._name}', message: {text}")
        return Internal(f"Stub process '{self._name}' is not healthy.")

    # In the event loop

    async def _unready_reason(self) -> str:
        """The answer of the model's `is_ready`, which all who ask at one time share, however late it is."""
        if self._process.lost:
            return _ENDED
        if self._readiness is None:
            self._readiness = self._loop.create_future()
            self._process.send(messages.CheckReady())
        try:
            return await asyncio.wait_for(asyncio.shield(self._readiness), _CHECK_SECONDS)
        except TimeoutError:
            return f"is_ready did not return within {_CHECK_SECONDS:g} s"

    def _set_readiness(self, reason: str) -> None:
        if self._readiness is not None:
            self._readiness.set_result(reason)
        self._readiness = None

    def _parent_context(self, handle: int) -> RequestContext | None:
        """The context of the request that the model asks another model for: it names one, or there is only one."""
        request = self._open.get(handle)
        if request is None and len(self._open) == 1:
            [request] = self._open.values()
        return None if request is None else request.context

    def on_message(self, message: Any) -> None:
        match message:
            case messages.Executed():
                self._executed.set_result(message)
            case messages.SendResponse():
                self._on_response(message)
            case messages.Reschedule():
                if message.handle in self._open:
                    self._waiting.add(message.handle)
                    self._open[message.handle].respond(Rescheduled(), False)
            case messages.Infer():
                self._calls.infer(message, self._parent_context(message.parent))
            case messages.Checked():
                self._set_readiness(message.unready_reason)
            case messages.Started() | messages.Initialized() | messages.Failed() | messages.LogMessage():
                self._first.on_message(message)
            case _:
                self._calls.on_message(message)

    def on_end(self, how: str) -> None:
        self._first.on_end(how)
        self._set_readiness(_ENDED)
        if not self._executed.done():
            self._executed.set_result(None)
        while self._open:
            _, request = self._open.popitem()
            self._handles.pop(request, None)
            request.respond(self._end_error(), True)
        self._calls.close()

    def _on_response(self, message: messages.SendResponse) -> None:
        request = self._open.get(message.handle)
        if request is None:
            if message.response is not None:
                self._process.reader.discard(message.response.outputs)
            return
        if message.final:
            self._forget(message.handle)
        request.respond(self._read(message.response), message.final)
