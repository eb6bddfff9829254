"""One execution: the requests of a batch become one set of arrays, the runtime's outputs become responses.

Runs in the thread of an instance. Knows nothing of queues and event loops.
"""

import logging
from collections.abc import Generator, Sequence
from contextlib import closing
from time import perf_counter_ns
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
from numpy.typing import NDArray

from ...core.errors import CharoniaError, Internal
from ...core.request import InferRequest, InferResponse
from ...telemetry.model_metrics import ExecutionTiming
from ..runtime import Arrays, Runtime, only_response
from ..signature import ModelSignature
from .batching_config import RaggedConfig
from .queued_request import InferenceJob

log = logging.getLogger(__name__)


class ExecutionResult(NamedTuple):
    """One response or error for each request, None for one that is answered later; or an `error` for all of them."""

    responses: Sequence[InferResponse | Exception | None]
    timing: ExecutionTiming
    error: Exception | None = None


class SequenceLayout(Protocol):
    """The additions of a stateful model to its batches; see `sequences.sequence_support.SequenceSupport`."""

    @property
    def iterative(self) -> bool: ...

    @property
    def tells_idle_rows(self) -> bool: ...

    @property
    def state_outputs(self) -> tuple[str, ...]: ...

    def arrange_rows(self, jobs: Sequence[InferenceJob]) -> Sequence[InferenceJob]: ...

    def sequence_inputs(self, jobs: Sequence[InferenceJob]) -> dict[str, NDArray[Any]]: ...

    def store_states(self, jobs: Sequence[InferenceJob], outputs: Sequence[Arrays]) -> None: ...


class BatchLayout(NamedTuple):
    """How the batches of a model are put together and taken apart. `by_request`: they are not, the runtime takes
    requests as they are."""

    signature: ModelSignature
    ragged: RaggedConfig = RaggedConfig()
    sequences: SequenceLayout | None = None
    by_request: bool = False

    @property
    def holds_sequences(self) -> bool:
        """Whether a sequence's next request needs to wait for the last answer to the one before."""
        return self.sequences is not None and (self.sequences.iterative or bool(self.sequences.state_outputs))


def execute_batch(
    runtime: Runtime, layout: BatchLayout, jobs: Sequence[InferenceJob], instance: str
) -> ExecutionResult:
    """Execute a batch of a model that answers each request once. `instance`: its name, for the log. Never raises."""
    marks = [perf_counter_ns()]
    try:
        jobs = jobs if layout.sequences is None else layout.sequences.arrange_rows(jobs)
        inputs = gather_inputs(layout, jobs)
        marks.append(perf_counter_ns())
        outputs = only_response(runtime.execute(inputs, _output_names(layout, jobs)))
        marks.append(perf_counter_ns())
        responses = split_outputs(layout, jobs, outputs)
    except BaseException as error:  # a model may do anything, even exit: its thread goes on
        return ExecutionResult((), _timing(marks), client_error(error, instance))
    return ExecutionResult(responses, _timing(marks))


def execute_single(runtime: Runtime, layout: BatchLayout, request: InferRequest, instance: str) -> ExecutionResult:
    """Execute one request without ragged inputs: as `execute_batch`, in half the time. Never raises."""
    marks, signature, requested = [perf_counter_ns()], layout.signature, request.outputs
    try:
        inputs = signature.to_arrays(request)
        marks.append(perf_counter_ns())
        outputs = only_response(runtime.execute(inputs, signature.outputs if requested is None else requested))
        marks.append(perf_counter_ns())
        responses = (InferResponse(signature.to_tensors(outputs, requested), final=True),)
    except BaseException as error:
        return ExecutionResult((), _timing(marks), client_error(error, instance))
    begin, gathered, computed = marks
    timing = ExecutionTiming(gathered - begin, computed - gathered, perf_counter_ns() - computed)
    return ExecutionResult(responses, timing)


def execute_decoupled(
    runtime: Runtime, layout: BatchLayout, job: InferenceJob, instance: str
) -> Generator[ExecutionResult, None, None]:
    """Execute one request of a decoupled model: a result for each response; an error is the last. Never raises."""
    marks = [perf_counter_ns()]
    try:
        inputs = gather_inputs(layout, [job])
        marks.append(perf_counter_ns())
        with closing(cast(Any, runtime.execute(inputs, _output_names(layout, [job])))) as responses:
            for outputs in responses:
                marks.append(perf_counter_ns())
                response = InferResponse(layout.signature.to_tensors(outputs, job.requested_outputs))
                yield ExecutionResult([response], _timing(marks))
                marks = marks[2:] * 2
    except GeneratorExit:
        raise
    except BaseException as error:
        yield ExecutionResult((), _timing(marks), client_error(error, instance))


def gather_inputs(layout: BatchLayout, jobs: Sequence[InferenceJob]) -> Arrays:
    """The inputs of all jobs, concatenated, and the tensors that the config derives from them."""
    ragged = {binding.name for binding in layout.signature.inputs if binding.ragged and not layout.by_request}
    inputs = {}
    for name in jobs[0].inputs:
        arrays = [job.inputs[name].ravel() if name in ragged else job.inputs[name] for job in jobs]
        inputs[name] = arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
    for batch_input in layout.ragged.inputs:
        if batch_input.source in inputs:
            inputs[batch_input.name] = batch_input.build([job.inputs[batch_input.source].shape for job in jobs])
    return inputs if layout.sequences is None else inputs | layout.sequences.sequence_inputs(jobs)


def split_outputs(layout: BatchLayout, jobs: Sequence[InferenceJob], outputs: Arrays) -> list[InferResponse]:
    """One response for each job that is no idle row. Raises `Internal` if an output does not have the batch's size."""
    parts: Sequence[Arrays] = [outputs]
    if len(jobs) > 1 or layout.ragged.outputs:
        split = {name: _split_output(layout, jobs, name, array) for name, array in outputs.items()}
        parts = [{name: arrays[index] for name, arrays in split.items()} for index in range(len(jobs))]
    if layout.sequences is not None:
        layout.sequences.store_states(jobs, parts)
    return [
        InferResponse(layout.signature.to_tensors(part, job.requested_outputs), final=True)
        for job, part in zip(jobs, parts, strict=True)
        if layout.sequences is None or job.sequence is not None
    ]


def _split_output(
    layout: BatchLayout, jobs: Sequence[InferenceJob], name: str, array: NDArray[Any]
) -> Sequence[NDArray[Any]]:
    if name not in layout.ragged.outputs:
        sizes = [job.batch_size for job in jobs]
        if array.ndim == 0 or len(array) != sum(sizes):
            raise Internal(f"output '{name}' has shape {list(array.shape)} for a batch of {sum(sizes)}")
        ends = np.cumsum(sizes).tolist()  # np.split takes three times as long
        return [array[end - size : end] for size, end in zip(sizes, ends, strict=True)]
    shapes = [job.inputs[layout.ragged.outputs[name]].shape for job in jobs]
    counts = [int(np.prod(shape)) for shape in shapes]
    if array.size != sum(counts):
        raise Internal(f"output '{name}' has {array.size} elements for {sum(counts)} of the batch's requests")
    parts = np.split(array.ravel(), np.cumsum(counts)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


def _output_names(layout: BatchLayout, jobs: Sequence[InferenceJob]) -> Sequence[str]:
    """The outputs that some job reads, or the sequences' states need."""
    names = layout.signature.outputs
    if all(job.requested_outputs is not None for job in jobs):
        requested = {name for job in jobs for name in job.requested_outputs or ()}
        names = tuple(name for name in names if name in requested)
    states = () if layout.sequences is None else layout.sequences.state_outputs
    return (*names, *(name for name in states if name not in names))


def _timing(marks: Sequence[int]) -> ExecutionTiming:
    """`marks`: begin, inputs gathered, outputs computed; of a failed execution only the first ones."""
    now = perf_counter_ns()
    begin, gathered, computed = (*marks, now, now)[:3]
    return ExecutionTiming(gathered - begin, computed - gathered, now - computed)


def client_error(error: BaseException, instance: str) -> Exception:
    """The error that a client sees; one that is not ours is logged."""
    if isinstance(error, CharoniaError):
        return error
    log.error("instance '%s' failed", instance, exc_info=error)
    message = f"{type(error).__name__}: {error}"
    return Internal(f"Failed to process the request(s) for model instance '{instance}', message: {message}")
