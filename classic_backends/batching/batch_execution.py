"""One execution: the requests of a batch become one set of arrays, what the runtime makes of it becomes responses.

Runs in the thread of an instance. Knows nothing of queues and event loops.
"""

import logging
from collections.abc import Generator, Sequence
from contextlib import closing
from time import perf_counter_ns
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from ...core.errors import CharoniaError, Internal
from ...core.request import InferRequest, InferResponse
from ..runtime import Arrays, Runtime
from ..sequences.stateful_batch import StatefulLayout
from ..signature import ModelSignature
from .inference_job import InferenceJob
from .ragged_batches import RaggedConfig, split_flat_output

log = logging.getLogger(__name__)


class ExecutionTiming(NamedTuple):
    """Nanoseconds: to prepare inputs, to compute, to make responses of outputs."""

    input: int = 0
    infer: int = 0
    output: int = 0


NO_TIMING = ExecutionTiming()


class ExecutionResult(NamedTuple):
    """What an execution made: for each request its responses, or for all of them an `error`."""

    responses: Sequence[InferResponse]
    timing: ExecutionTiming
    error: Exception | None = None


class BatchLayout(NamedTuple):
    """How a model's batches are put together and taken apart."""

    signature: ModelSignature
    ragged: RaggedConfig = RaggedConfig()
    stateful: StatefulLayout | None = None


def execute_batch(runtime: Runtime, form: BatchLayout, jobs: Sequence[InferenceJob], name: str) -> ExecutionResult:
    """Run a batch on the instance `name` of a model that answers each request once. Never raises."""
    marks = [perf_counter_ns()]
    try:
        jobs = jobs if form.stateful is None else form.stateful.arrange_rows(jobs)
        inputs = gather_inputs(form, jobs)
        marks.append(perf_counter_ns())
        made = _only(runtime, inputs, _wanted(form, jobs))
        marks.append(perf_counter_ns())
        responses = split_outputs(form, jobs, made)
    except BaseException as error:
        # Whatever a model does, even to exit, is no business of the thread it runs in.
        return ExecutionResult((), _timing(marks), client_error(error, name))
    return ExecutionResult(responses, _timing(marks))


def execute_single(runtime: Runtime, form: BatchLayout, request: InferRequest, name: str) -> ExecutionResult:
    """What `execute` does, for one request of a model without ragged inputs: in half the time. Never raises."""
    marks, signature, wanted = [perf_counter_ns()], form.signature, request.outputs
    try:
        inputs = signature.to_arrays(request)
        marks.append(perf_counter_ns())
        made = _only(runtime, inputs, signature.outputs if wanted is None else wanted)
        marks.append(perf_counter_ns())
        responses = (InferResponse(signature.to_tensors(made, wanted), final=True),)
    except BaseException as error:
        return ExecutionResult((), _timing(marks), client_error(error, name))
    begin, prepared, done = marks
    return ExecutionResult(responses, ExecutionTiming(prepared - begin, done - prepared, perf_counter_ns() - done))


def execute_decoupled(
    runtime: Runtime, form: BatchLayout, job: InferenceJob, name: str
) -> Generator[ExecutionResult, None, None]:
    """Run one request on the instance of a decoupled model: a result for each response. Never raises; an error is the
    last result."""
    marks = [perf_counter_ns()]
    try:
        inputs = gather_inputs(form, [job])
        marks.append(perf_counter_ns())
        with closing(cast(Any, runtime.execute(inputs, _wanted(form, [job])))) as made:
            for arrays in made:
                marks.append(perf_counter_ns())
                responses = [InferResponse(form.signature.to_tensors(arrays, job.requested_outputs))]
                yield ExecutionResult(responses, _timing(marks))
                marks = marks[2:] * 2
    except GeneratorExit:
        raise
    except BaseException as error:
        yield ExecutionResult((), _timing(marks), client_error(error, name))


def gather_inputs(form: BatchLayout, jobs: Sequence[InferenceJob]) -> Arrays:
    """The inputs of all jobs one after the other, and what the config wants made of their shapes."""
    ragged = {side.name for side in form.signature.inputs if side.ragged}
    inputs = {name: _joined([job.inputs[name] for job in jobs], name in ragged) for name in jobs[0].inputs}
    for made in form.ragged.inputs:
        if made.source in inputs:
            inputs[made.name] = made.build([job.inputs[made.source].shape for job in jobs])
    return inputs if form.stateful is None else inputs | form.stateful.sequence_inputs(jobs)


def _joined(arrays: list[NDArray[Any]], flat: bool) -> NDArray[Any]:
    if flat:
        arrays = [array.ravel() for array in arrays]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def split_outputs(form: BatchLayout, jobs: Sequence[InferenceJob], made: Arrays) -> list[InferResponse]:
    """Each job's part of the outputs; none of rows that were idle.

    Raises:
        Internal: an output is not as large as the batch.
    """
    parts = _split(form, jobs, made)
    if form.stateful is None:
        return [_response(form, job, part) for job, part in zip(jobs, parts, strict=True)]
    form.stateful.store_states(jobs, parts)
    return [_response(form, job, part) for job, part in zip(jobs, parts, strict=True) if job.sequence is not None]


def _split(form: BatchLayout, jobs: Sequence[InferenceJob], made: Arrays) -> Sequence[Arrays]:
    scatter = form.ragged.outputs
    if len(jobs) == 1 and not scatter:
        return [made]
    parts = {name: _parts(name, array, jobs, scatter.get(name)) for name, array in made.items()}
    return [{name: each[index] for name, each in parts.items()} for index in range(len(jobs))]


def _response(form: BatchLayout, job: InferenceJob, made: Arrays) -> InferResponse:
    return InferResponse(form.signature.to_tensors(made, job.requested_outputs), final=True)


def _parts(name: str, array: NDArray[Any], jobs: Sequence[InferenceJob], source: str | None) -> Sequence[NDArray[Any]]:
    if source is not None:
        return split_flat_output(name, array, [job.inputs[source].shape for job in jobs])
    sizes = [job.batch_size for job in jobs]
    if array.ndim == 0 or len(array) != sum(sizes):
        raise Internal(f"output '{name}' has shape {list(array.shape)} for a batch of {sum(sizes)}")
    ends = np.cumsum(sizes).tolist()
    return [array[end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _wanted(form: BatchLayout, jobs: Sequence[InferenceJob]) -> Sequence[str]:
    names = form.signature.outputs
    kept = () if form.stateful is None else form.stateful.state_outputs
    if all(job.requested_outputs is not None for job in jobs):
        asked = {name for job in jobs for name in job.requested_outputs or ()}
        names = tuple(name for name in names if name in asked)
    return (*names, *(name for name in kept if name not in names))


def _only(runtime: Runtime, inputs: Arrays, wanted: Sequence[str]) -> Arrays:
    made = list(runtime.execute(inputs, wanted))
    if len(made) != 1:
        raise Internal(f"expected a single response, got {len(made)}")
    return made[0]


def _timing(marks: Sequence[int]) -> ExecutionTiming:
    """Begin, inputs there, outputs there, and now; of what failed, as far as it came."""
    now = perf_counter_ns()
    begin, prepared, made = (*marks, now, now)[:3]
    return ExecutionTiming(prepared - begin, made - prepared, now - made)


def client_error(error: BaseException, name: str) -> Exception:
    """What a client is told of an error in the instance `name`."""
    if isinstance(error, CharoniaError):
        return error
    log.error("instance '%s' failed", name, exc_info=error)
    said = f"{type(error).__name__}: {error}"
    return Internal(f"Failed to process the request(s) for model instance '{name}', message: {said}")
