"""What a Python model asks of the server: to infer with other models, to load and unload them, to keep metrics.

Everything here happens in the event loop. Knows nothing of the model's own requests but their contexts.
"""

import asyncio
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from inspect import isawaitable
from typing import Any

from ...core.errors import (
    Cancelled,
    CharoniaError,
    ErrorCode,
    Internal,
    InvalidArgument,
    Unavailable,
    error_from_code,
)
from ...core.request import InferRequest, ParameterValue
from ...core.request_context import RequestContext
from ...core.tensor import Tensor
from ...core.wait_graph import AwaitedCall
from ...telemetry.custom_metrics import CustomMetrics
from ...telemetry.shared_state import ServerAdministration
from ..python_stub.messages import (
    MAX_UNREAD_ANSWERS,
    AwaitAnswer,
    Call,
    CallAnswer,
    CancelInfer,
    ErrorMessage,
    Infer,
    InferAnswer,
    ReadAnswers,
    RequestMessage,
    ResponseMessage,
    TensorMessage,
    UpdateMetric,
)
from .stub_process import StubProcess

log = logging.getLogger(__name__)

ENDPOINT = "python"
"""The endpoint that requests of Python models come from, in logs and traces."""

MAX_INFERENCES = 1024

_TRITON_CODES = {
    ErrorCode.INVALID_ARGUMENT: "INVALID_ARG",
    ErrorCode.UNAUTHENTICATED: "UNAVAILABLE",
    ErrorCode.RESOURCE_EXHAUSTED: "UNAVAILABLE",
}
"""Our error codes that `TritonError` has by another name, or lacks."""


def error_message(error: CharoniaError) -> ErrorMessage:
    return ErrorMessage(_TRITON_CODES.get(error.code, error.code.value), error.message)


def error_from_message(error: ErrorMessage) -> CharoniaError:
    code = ErrorCode.INVALID_ARGUMENT.value if error.code == "INVALID_ARG" else error.code
    return error_from_code(code, error.message)


def write_tensors(process: StubProcess, tensors: Sequence[Tensor]) -> list[TensorMessage]:
    return process.writer.write_all((tensor.name, tensor.datatype, tensor.data) for tensor in tensors)


def read_tensors(process: StubProcess, tensors: Sequence[TensorMessage]) -> list[Tensor]:
    """Tensors over the process's memory; their blocks are its again when they are gone."""
    return [
        Tensor(message.name, message.datatype, tuple(message.shape), process.reader.read(message))
        for message in tensors
    ]


def _read_request(message: RequestMessage, inputs: Sequence[Tensor]) -> InferRequest:
    parameters: dict[str, ParameterValue] = json.loads(message.parameters)
    if message.correlation_id:
        parameters["sequence_id"] = message.correlation_id
        parameters["sequence_start"] = bool(message.flags & 1)
        parameters["sequence_end"] = bool(message.flags & 2)
    if message.timeout:
        parameters["timeout"] = message.timeout
    if message.priority:
        parameters["priority"] = message.priority
    tensors = {tensor.name: tensor for tensor in inputs}
    return InferRequest(message.id, tensors, tuple(message.outputs) or None, parameters)


@dataclass(slots=True, eq=False)
class _OpenInference:
    """A request of the process to another model."""

    message: Infer
    parent: RequestContext | None
    room: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(MAX_UNREAD_ANSWERS))
    """Room for responses that the process has not read yet."""
    answers: int = 0
    """Responses sent so far."""
    awaited_from: int = -1
    """How many responses were sent when the process did nothing but wait for the next one; -1 if it never did."""
    context: RequestContext | None = None
    """Set when `task` begins."""
    task: asyncio.Task[None] = field(init=False)


class ModelCalls:
    """The calls of one process, until it ends. `max_inferences`: requests to other models that may be open at once."""

    def __init__(
        self,
        process: StubProcess,
        gateway: ServerAdministration,
        metrics: CustomMetrics,
        max_inferences: int = MAX_INFERENCES,
    ) -> None:
        self._process = process
        self._gateway = gateway
        self._metrics = metrics
        self._max_inferences = max_inferences
        self._inferences: dict[int, _OpenInference] = {}
        self._calls: set[asyncio.Task[None]] = set()

        async def is_model_ready(name: str, version: str) -> bool:
            return not await gateway.unready_reason(name, version)

        self._methods: Mapping[str, Callable[..., Any]] = {
            "load_model": lambda name, config, files: gateway.load_model(
                name, config or None, {path: bytes.fromhex(content) for path, content in files.items()}
            ),
            "unload_model": lambda name, dependents: gateway.unload_model(name, dependents),
            "is_model_ready": is_model_ready,
            "add_metric_family": lambda name, description, kind: metrics.add_family(name, description, kind),
            "add_metric": lambda family, labels, buckets: metrics.add_metric(self, family, labels, buckets),
            "metric_value": lambda metric: metrics.value(metric),
        }

    def close(self) -> None:
        """Cancel everything that the process has asked for, and remove its metrics."""
        for task in (*(inference.task for inference in self._inferences.values()), *self._calls):
            task.cancel()
        self._metrics.remove_all(self)

    def infer(self, message: Infer, parent: RequestContext | None) -> None:
        """Begin to answer. `parent`: the context of the request that the model asks for."""
        inputs = read_tensors(self._process, message.request.inputs)  # now, for a task may be cancelled unbegun
        if len(self._inferences) >= self._max_inferences:
            text = f"instance '{self._process.name}' has {self._max_inferences} requests to other models open"
            self._send_failure(message.call, Unavailable(f"{text}, which are the most (max-open-calls)"))
            return
        inference = self._inferences[message.call] = _OpenInference(message, parent)
        answering = self._infer(inference, inputs)
        inference.task = asyncio.create_task(answering, name=f"{self._process.name} asks {message.model}")
        inference.task.add_done_callback(lambda _: self._inferences.pop(message.call))

    def on_message(self, message: Any) -> None:
        """Take a message that follows an `infer`, or any other call."""
        match message:
            case CancelInfer(call, answered) if call in self._inferences:
                self._cancel_infer(self._inferences[call], answered)
            case AwaitAnswer(call, answers) if call in self._inferences:
                self._inferences[call].awaited_from = answers
                self._gateway.shared_state.waits.check()
            case ReadAnswers(call, answers) if call in self._inferences:
                for _ in range(answers):
                    self._inferences[call].room.release()
            case Call():
                task = asyncio.create_task(self._call(message), name=f"{self._process.name} calls {message.method}")
                self._calls.add(task)
                task.add_done_callback(self._calls.discard)
            case UpdateMetric():
                self._metrics.update(self, message.metric, message.operation, message.value)

    def awaited(self) -> list[AwaitedCall]:
        """The requests whose next response the process waits for, and does nothing else."""
        return [
            AwaitedCall(inference.context, partial(self._refuse, inference))
            for inference in self._inferences.values()
            if inference.awaited_from == inference.answers and inference.context is not None
        ]

    def _cancel_infer(self, inference: _OpenInference, answered: bool) -> None:
        """`answered`: the process reads on, until the called model has ended or, where it cannot be asked to, now."""
        context = inference.context
        if not answered:
            inference.task.cancel()
        elif context is None or context.ask_to_end is None or not context.ask_to_end():
            self._refuse(inference, Cancelled(f"the request to model '{inference.message.model}' was cancelled"))

    def _refuse(self, inference: _OpenInference, error: CharoniaError) -> None:
        inference.task.cancel()
        self._send_failure(inference.message.call, error)

    async def _infer(self, inference: _OpenInference, inputs: Sequence[Tensor]) -> None:
        message = inference.message
        parent = inference.parent
        sent_final = False
        try:
            with self._gateway.open_request(ENDPOINT, () if parent is None else parent.headers) as context:
                inference.context = context
                if parent is not None:
                    parent.adopt(context)
                try:
                    handle = await self._gateway.acquire(context, message.model, message.version)
                except CharoniaError as error:
                    failed = f"Failed for execute the inference request. Model '{message.model}' is not ready."
                    raise error_from_code(error.code, f"{failed} {error.message}") from None
                if handle.config.decoupled and not message.decoupled:
                    name = handle.config.name
                    raise InvalidArgument(f"model '{name}' is decoupled: call exec or async_exec with decoupled=True")
                async with aclosing(handle.infer(_read_request(message.request, inputs))) as responses:
                    async for response in responses:
                        await inference.room.acquire()
                        sent_final = response.final or not message.decoupled
                        inference.answers += 1
                        outputs = write_tensors(self._process, response.outputs)
                        answer = ResponseMessage(outputs, None, json.dumps(dict(response.parameters)))
                        self._process.send(InferAnswer(message.call, answer, sent_final))
        except CharoniaError as error:
            self._send_failure(message.call, error)
        except Exception as error:
            log.exception("instance '%s': its request to model '%s' failed", self._process.name, message.model)
            self._send_failure(message.call, Internal(f"{type(error).__name__}: {error}"))
        else:
            if not sent_final:
                self._process.send(InferAnswer(message.call, None, True))

    def _send_failure(self, call: int, error: CharoniaError) -> None:
        self._process.send(InferAnswer(call, ResponseMessage([], error_message(error)), True))

    async def _call(self, message: Call) -> None:
        try:
            result = self._methods[message.method](**json.loads(message.arguments))
            result = await result if isawaitable(result) else result
        except CharoniaError as error:
            answer = CallAnswer(message.call, error=error.message)
        except Exception as error:
            log.exception("instance '%s': its call of %s failed", self._process.name, message.method)
            answer = CallAnswer(message.call, error=f"{type(error).__name__}: {error}")
        else:
            answer = CallAnswer(message.call, json.dumps(result))
        self._process.send(answer)
