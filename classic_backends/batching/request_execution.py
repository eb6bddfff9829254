"""The executions of a runtime that takes requests as they are: it answers some when it returns, others later, and some
requests come again.

A batch runs in the instance's thread; everything else happens in the event loop.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Protocol

import msgspec

from ...core.errors import CharoniaError, Internal
from ...core.request import InferResponse, ParameterValue
from ...core.request_context import RequestContext
from ...core.runtime import Rescheduled, Runtime, RuntimeAnswer, RuntimeRequest
from ...telemetry.model_metrics import NO_TIMING, CloseReason, ExecutionTiming
from .batch_execution import BatchLayout, ExecutionResult, client_error, gather_inputs, split_outputs
from .inference_job import InferenceJob
from .queued_request import QueuedRequest, RequestBatch
from .response_router import BatchResult, ResponseRouter

_SEQUENCE_START, _SEQUENCE_END = 1, 2
"""Triton's flags of a request."""

_FIELDS = {"sequence_id", "sequence_start", "sequence_end", "priority", "timeout"}
"""Parameters of the protocol that a model sees as fields of its request."""


class RequestSource(Protocol):
    """The queue that a batch's requests come from, and go back to."""

    @property
    def call_in_loop(self) -> Callable[..., None]:
        """Calls a function with its arguments in the event loop's thread; called from any thread."""

    def settle_batch(self, again: Sequence[QueuedRequest], held: Mapping[QueuedRequest, bool]) -> None:
        """The batch of an instance was executed: queue some of its requests `again`, and keep the place of those
        `held`, of which more is to come: true for one that waits for its reader. Called in the instance's thread."""

    def release(self, request: QueuedRequest, again: bool = False) -> None:
        """A request that was held is to be executed `again`, or is finished. Called in the event loop."""


@dataclass(frozen=True, slots=True)
class RequestExecutor:
    """Executes the batches of one model. `decoupled`: the model makes any number of responses to a request."""

    layout: BatchLayout
    decoupled: bool
    responses: ResponseRouter
    source: RequestSource

    def execute_batch(self, runtime: Runtime, batch: RequestBatch, instance: str) -> None:
        """Called in the thread of an instance; `instance` is its name, for the log. Never raises."""
        started_at = gathered_at = computed_at = time.monotonic_ns()
        if any(queued.finished for queued in batch.requests):  # its runtime failed it after it had asked for it again
            batch = batch._replace(requests=[queued for queued in batch.requests if not queued.finished])
        if not batch.requests:
            return
        executions = [self._execution_of(queued, runtime, started_at) for queued in batch.requests]
        try:
            requests = [execution.prepare(batch, started_at) for execution in executions]
            gathered_at = time.monotonic_ns()
            answers = self._execute_rows(runtime, batch, requests)
            computed_at = time.monotonic_ns()
            responses = [execution.read(answer) for execution, answer in zip(executions, answers, strict=True)]
        except BaseException as error:  # a model may do anything: the thread goes on
            # Not by a name of its own here: this frame would hold the error that holds it.
            self.source.call_in_loop(_fail_all, executions, client_error(error, instance))
            return
        timing = ExecutionTiming(gathered_at - started_at, computed_at - gathered_at, time.monotonic_ns() - computed_at)
        crowded = self._settle(executions, answers, responses)

        def finish() -> None:
            result = ExecutionResult([None] * len(executions), timing)
            self.responses.on_batch_done(BatchResult(batch, started_at, result))
            for execution, response in zip(executions, responses, strict=True):
                execution.on_executed(response, timing)
            for execution in crowded:
                execution.resume()

        self.source.call_in_loop(finish)

    def _execution_of(self, queued: QueuedRequest, runtime: Runtime, started_at: int) -> "RequestExecution":
        execution = queued.execution
        if execution is None:
            return RequestExecution(self, runtime, queued, started_at)
        assert isinstance(execution, RequestExecution)
        return execution

    def _settle(
        self,
        executions: Sequence["RequestExecution"],
        answers: Sequence[RuntimeAnswer],
        responses: Sequence[InferResponse | Exception | None],
    ) -> Sequence["RequestExecution"]:
        """Tell the queue which requests come again, and return those that do once their readers have read enough."""
        answered = list(zip(executions, answers, responses, strict=True))
        rescheduled = [
            execution
            for execution, answer, response in answered
            if isinstance(answer, Rescheduled) and response is None
        ]
        crowded = [execution for execution in rescheduled if not execution.queued.channel.drained]
        held = {execution.queued: True for execution in crowded}
        if self.layout.holds_sequences:
            held |= {execution.queued: False for execution, answer, _ in answered if answer is None}
        again = [execution.queued for execution in rescheduled if execution not in crowded]
        self.source.settle_batch(again, held)
        return crowded

    def _execute_rows(
        self, runtime: Runtime, batch: RequestBatch, requests: Sequence[RuntimeRequest]
    ) -> Sequence[RuntimeAnswer]:
        """The answers to `requests`, which are those of `batch`. A model with fixed rows that can tell idle ones gets a
        request for each of these, too."""
        layout = self.layout
        sequences = layout.sequences
        if sequences is None or not sequences.tells_idle_rows:
            return runtime.execute_requests(requests)
        jobs = [queued.job for queued in batch.requests]
        by_job = dict(zip(jobs, requests, strict=True))
        rows = []
        for job in sequences.arrange_rows(jobs):
            idle = RuntimeRequest({}, (), lambda answer, final: None, RequestContext("idle"))
            if job not in by_job:  # its states have the shapes of another row's
                idle.inputs = {name: array[1:] for name, array in gather_inputs(layout, [jobs[0], job]).items()}
            rows.append(by_job.get(job, idle))
        answers = dict(zip(rows, runtime.execute_requests(rows), strict=True))
        for row in rows:
            if row not in requests and isinstance(answers[row], Rescheduled):
                self.source.call_in_loop(runtime.cancel_request, row)
        return [answers[request] for request in requests]


class RequestExecution:
    """One request in the hands of a runtime, from its first execution to its last answer: an `OpenExecution`."""

    def __init__(self, executor: RequestExecutor, runtime: Runtime, queued: QueuedRequest, started_at: int) -> None:
        self.queued = queued
        self._source = executor.source
        self._responses = executor.responses
        self._layout = executor.layout
        self._decoupled = executor.decoupled
        self._runtime = runtime
        self._started_at = started_at
        self._timing = NO_TIMING
        self._mark = started_at
        self._batch = RequestBatch([queued], CloseReason.ALONE)
        self._request = _make_request(self._layout, queued.job, self.respond, queued.context)
        if queued.job.sequence_flags is None:
            _place_in_sequence(self._request, queued.parameters)
        self._request.id = queued.request_id
        self._request.parameters = {name: value for name, value in queued.parameters.items() if name not in _FIELDS}
        self._request.timeout = queued.timeout_ns // 1000
        self._request.priority = queued.priority
        queued.execution = self

    # In the instance's thread

    def prepare(self, batch: RequestBatch, started_at: int) -> RuntimeRequest:
        """The request for the next execution, as a part of `batch`."""
        self._batch = self._batch._replace(close_reason=batch.close_reason)
        self._mark = started_at
        self._request.cancelled = self._request.cancelled or self.queued.given_up
        return _filled(self._request, self._layout, self.queued.job)

    def read(self, answer: RuntimeAnswer, final: bool = False) -> InferResponse | Exception | None:
        """An answer as the client gets it; None if there is none yet. `final`: a decoupled model has no more. In either
        thread."""
        if answer is None or isinstance(answer, Exception):
            return answer
        try:
            if isinstance(answer, Rescheduled):
                _reschedule(self._layout, self.queued.job, answer)
                return None
            [response] = split_outputs(self._layout, [self.queued.job], answer.outputs)
        except CharoniaError as error:
            return error
        if self._decoupled and answer.outputs and not (response.outputs or answer.parameters):
            return None  # it had nothing but states
        return msgspec.structs.replace(response, parameters=answer.parameters, final=final or not self._decoupled)

    # In the event loop

    def close(self) -> None:
        self._request.respond = lambda answer, final: None

    def cancel(self) -> None:
        self._request.cancelled = True
        self._runtime.cancel_request(self._request)

    def on_executed(self, response: InferResponse | Exception | None, timing: ExecutionTiming) -> None:
        """The batch is executed; `response`: this request's, if it came with the batch's."""
        self._timing = _sum(self._timing, timing)
        self._mark = time.monotonic_ns()
        if response is not None:
            self._deliver(response, NO_TIMING, True)

    def resume(self) -> None:
        """Execute a rescheduled request again, once its reader has read enough."""
        if self.queued.channel.drained:
            self._runtime.hold_request(self._request, False)
            self._source.release(self.queued, again=True)
        else:
            self.queued.channel.on_drained = self.resume

    def respond(self, answer: RuntimeAnswer, final: bool) -> None:
        """Take an answer that does not come with the whole batch's."""
        if self.queued.finished:
            return
        response = self.read(answer, final)
        now = time.monotonic_ns()
        since_last = now - self._mark
        self._mark = now
        if isinstance(answer, Rescheduled) and response is None:
            self._source.release(self.queued, again=True)
        elif response is not None or final:
            self._deliver(response, ExecutionTiming(0, since_last, 0), final)

    def _deliver(self, response: InferResponse | Exception | None, timing: ExecutionTiming, final: bool) -> None:
        channel = self.queued.channel
        if not self._decoupled and response is not None:
            result = ExecutionResult([response], _sum(self._timing, timing))
            self._responses.on_batch_done(BatchResult(self._batch, self._started_at, result), counted=True)
        elif isinstance(response, Exception):
            result = ExecutionResult((), timing, response)
            self._responses.on_stream_response(BatchResult(self._batch, self._started_at, result))
        elif response is not None:
            result = ExecutionResult([response], timing)
            self._responses.on_stream_response(BatchResult(self._batch, self._started_at, result))
        if isinstance(response, Exception):
            final = True
            self.cancel()
        if self._decoupled and final:
            self._responses.on_stream_end(self._batch, self._started_at, counted=True)
        elif channel.full and channel.on_drained is None:
            self._runtime.hold_request(self._request, True)
            channel.on_drained = partial(self._runtime.hold_request, self._request, False)


def _fail_all(executions: Sequence[RequestExecution], error: Exception) -> None:
    """Tell the error to the requests that have no last answer yet."""
    for execution in executions:
        execution.respond(error, True)


def _reschedule(layout: BatchLayout, job: InferenceJob, answer: Rescheduled) -> None:
    """Make a job ready to come again. Raises `Internal` for a model that may not ask for that."""
    if layout.sequences is None or not layout.sequences.iterative or job.sequence_flags is None:
        needs = "which needs sequence_batching { iterative_sequence: true } in its config"
        raise Internal(f"model '{layout.signature.model_name}' rescheduled a request, {needs}")
    layout.sequences.store_states([job], [answer.outputs])
    job.sequence_flags = job.sequence_flags._replace(start=False)


def _sum(left: ExecutionTiming, right: ExecutionTiming) -> ExecutionTiming:
    return ExecutionTiming(*map(sum, zip(left, right, strict=True)))


def _make_request(
    layout: BatchLayout, job: InferenceJob, respond: Callable[[RuntimeAnswer, bool], None], context: RequestContext
) -> RuntimeRequest:
    """A request without inputs; it wants the job's outputs, and those of its sequence's states."""
    states = () if layout.sequences is None else layout.sequences.state_outputs
    client_outputs = layout.signature.outputs if job.requested_outputs is None else job.requested_outputs
    output_names = tuple(dict.fromkeys((*client_outputs, *states)))
    sequence_id = 0 if job.sequence_flags is None else job.sequence_flags.id
    return RuntimeRequest({}, output_names, respond, context, correlation_id=sequence_id)


def _place_in_sequence(request: RuntimeRequest, parameters: Mapping[str, ParameterValue]) -> None:
    """Tell a model without `sequence_batching` what its client says of a sequence, as Triton does."""
    sequence_id, start, end = (parameters.get(f"sequence_{name}") for name in ("id", "start", "end"))
    if isinstance(sequence_id, int | str) and not isinstance(sequence_id, bool):
        request.correlation_id = sequence_id
    request.flags = bool(start) * _SEQUENCE_START | bool(end) * _SEQUENCE_END


def _filled(request: RuntimeRequest, layout: BatchLayout, job: InferenceJob) -> RuntimeRequest:
    """The request with the inputs and flags of its next execution."""
    flags = job.sequence_flags
    request.inputs = gather_inputs(layout, [job])
    if flags is not None:
        request.flags = flags.start * _SEQUENCE_START | flags.end * _SEQUENCE_END
    return request


def execute_alone(runtime: Runtime, layout: BatchLayout, job: InferenceJob, instance: str) -> Exception | None:
    """Execute a request that no client waits for, until it has its last answer, and return its error. Never raises."""
    arrived: SimpleQueue[tuple[RuntimeAnswer, bool]] = SimpleQueue()
    context = RequestContext("warm-up")
    try:
        request = _make_request(layout, job, lambda answer, final: arrived.put((answer, final)), context)
        answer: RuntimeAnswer = Rescheduled()
        final = False
        while not final:
            if isinstance(answer, Rescheduled):
                [answer] = runtime.execute_requests([_filled(request, layout, job)])
                final = answer is not None and not isinstance(answer, Rescheduled)
            else:
                answer, final = arrived.get()
            if isinstance(answer, Rescheduled):
                _reschedule(layout, job, answer)
            elif isinstance(answer, Exception):
                return answer
            elif answer is not None:
                split_outputs(layout, [job], answer.outputs)
    except BaseException as error:
        return client_error(error, instance)
    return None
