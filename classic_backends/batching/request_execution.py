"""One execution of a runtime that takes requests as they are: it answers some when it returns, others later.

`run` is called in the instance's thread; everything else happens in the event loop.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import msgspec

from ...core.errors import CharoniaError
from ...core.request import InferResponse
from ...telemetry.model_metrics import NO_TIMING, ExecutionTiming
from ..runtime import RequestRuntime, Rescheduled, RuntimeAnswer, RuntimeRequest, RuntimeResponse
from .batch_execution import (
    BatchLayout,
    ExecutionResult,
    client_error,
    gather_inputs,
    split_outputs,
)
from .dynamic_batcher import RequestBatch
from .queued_request import QueuedRequest
from .response_router import BatchResult, ResponseRouter

_SEQUENCE_START, _SEQUENCE_END = 1, 2
"""Triton's flags of a request."""


class ExecutionSurroundings(NamedTuple):
    """What all executions of a model share. `call_in_loop` calls in the event loop, from any thread; `resubmit` queues
    a request again."""

    layout: BatchLayout
    decoupled: bool
    router: ResponseRouter
    call_in_loop: Callable[..., None]
    resubmit: Callable[[QueuedRequest], None]


class RequestExecution:
    """One batch in the hands of a runtime. `started_at`: nanoseconds of `time.monotonic_ns`."""

    def __init__(
        self, surroundings: ExecutionSurroundings, runtime: RequestRuntime, batch: RequestBatch, started_at: int
    ) -> None:
        self._layout, self._decoupled, self._router, self._call_in_loop, self._resubmit = surroundings
        self._runtime, self._batch, self._started_at = runtime, batch, started_at
        self._mark = started_at
        self._open = set(batch.requests)

    def run(self, instance: str) -> None:
        """Execute the batch. `instance`: its name, for the log. Never raises."""
        computed_at = gathered_at = self._started_at
        try:
            requests = [self._make_request(queued) for queued in self._batch.requests]
            gathered_at = time.monotonic_ns()
            answers = self._runtime.execute_requests(requests)
            computed_at = time.monotonic_ns()
            responses = [self._read(*each) for each in zip(self._batch.requests, answers, strict=True)]
        except BaseException as error:  # a model may do anything: the thread goes on
            self._call_in_loop(self._fail, client_error(error, instance))
            return
        now = time.monotonic_ns()
        timing = ExecutionTiming(gathered_at - self._started_at, computed_at - gathered_at, now - computed_at)
        rescheduled = [
            queued
            for queued, answer in zip(self._batch.requests, answers, strict=True)
            if isinstance(answer, Rescheduled)
        ]
        self._call_in_loop(self._finish, responses, timing, rescheduled)

    def _make_request(self, queued: QueuedRequest) -> RuntimeRequest:
        job, sequence = queued.job, queued.job.sequence_flags
        request = RuntimeRequest(
            gather_inputs(self._layout, [job]),
            () if job.requested_outputs is None else job.requested_outputs,
            lambda answer, final: self._respond(queued, request, answer, final),
            queued.context,
            queued.request_id,
            0 if sequence is None else sequence.id,
            0 if sequence is None else sequence.start * _SEQUENCE_START | sequence.end * _SEQUENCE_END,
            queued.timeout_ns // 1000,
            queued.priority,
            queued.parameters,
        )
        queued.on_give_up = partial(self._runtime.cancel_request, request)
        if queued.given_up:
            self._call_in_loop(queued.on_give_up)
        return request

    def _read(self, queued: QueuedRequest, answer: RuntimeAnswer) -> InferResponse | Exception | None:
        """An answer as the client gets it; None if there is none yet."""
        if answer is None or isinstance(answer, (Rescheduled, Exception)):
            return None if isinstance(answer, Rescheduled) else answer
        try:
            [response] = split_outputs(self._layout, [queued.job], answer.outputs)
        except CharoniaError as error:
            return error
        return msgspec.structs.replace(response, parameters=answer.parameters, final=not self._decoupled)

    # In the event loop

    def _finish(
        self,
        responses: Sequence[InferResponse | Exception | None],
        timing: ExecutionTiming,
        rescheduled: Sequence[QueuedRequest],
    ) -> None:
        self._router.on_batch_done(BatchResult(self._batch, self._started_at, ExecutionResult(responses, timing)))
        self._mark = time.monotonic_ns()
        for queued, response in zip(self._batch.requests, responses, strict=True):
            if response is not None:
                self._close(queued)
        for queued in rescheduled:
            self._close(queued)
            if queued.job.sequence_flags is not None:
                queued.job.sequence_flags = queued.job.sequence_flags._replace(start=False)
            self._resubmit(queued)

    def _fail(self, error: Exception) -> None:
        """Tell the error to the requests that have no answer yet."""
        left = [queued for queued in self._batch.requests if queued in self._open]
        if self._decoupled:
            for queued in left:
                self._respond(queued, None, error, True)
        elif left:
            for queued in left:
                self._close(queued)
            batch = RequestBatch(left, self._batch.close_reason)
            self._router.on_batch_done(BatchResult(batch, self._started_at, ExecutionResult((), NO_TIMING, error)))

    def _respond(
        self,
        queued: QueuedRequest,
        request: RuntimeRequest | None,
        answer: RuntimeResponse | Exception | None,
        final: bool,
    ) -> None:
        """Take a response that does not come with the whole batch's."""
        if queued not in self._open:
            return
        batch = RequestBatch([queued], self._batch.close_reason)
        if answer is not None:
            response, mark = self._read(queued, answer), self._mark
            self._mark = time.monotonic_ns()
            timing = ExecutionTiming(0, self._mark - mark, 0)
            final = final or isinstance(response, Exception) or not self._decoupled
            if not self._decoupled:
                self._router.on_batch_done(self._result(batch, ExecutionResult([response], timing)), counted=True)
            elif isinstance(response, Exception):
                self._router.on_stream_response(self._result(batch, ExecutionResult((), timing, response)))
            else:
                self._router.on_stream_response(self._result(batch, ExecutionResult([response], timing)))
        if final:
            self._close(queued)
            if self._decoupled:
                self._router.on_stream_end(batch, self._started_at, counted=True)
        elif request is not None and queued.channel.full and queued.channel.on_drained is None:
            self._runtime.hold_request(request, True)
            queued.channel.on_drained = partial(self._runtime.hold_request, request, False)

    def _result(self, batch: RequestBatch, result: ExecutionResult) -> BatchResult:
        return BatchResult(batch, self._started_at, result)

    def _close(self, queued: QueuedRequest) -> None:
        self._open.discard(queued)
        queued.on_give_up = None
