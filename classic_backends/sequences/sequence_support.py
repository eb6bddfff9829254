"""A stateful model's additions to a classic one: the sequence parameters of its requests, and the idle rows, controls
and states of its batches.

Batches are made in the thread of an instance. Source:
https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_sequence.md. Knows nothing of which
sequences are open.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ...core.errors import Internal, InvalidArgument, request_id_prefix
from ...core.model import ModelConfig
from ...core.request import InferRequest
from ...core.runtime import Arrays
from ...core.tensor import NUMPY_TYPES, Tensor, zero_array
from ..batching.inference_job import InferenceJob, SequenceContext, SequenceFlags, SequenceId
from .sequence_config import (
    ControlKind,
    ControlTensor,
    SequenceConfig,
    StateTensor,
    read_sequence_config,
    with_sequence_tensors,
)


class SequenceSupport:
    """The additions of a stateful model to its requests and batches: a `batch_execution.SequenceLayout`."""

    def __init__(self, config: SequenceConfig, model: ModelConfig) -> None:
        by_kind = {control.kind: control for control in config.controls}
        self.config = config
        self.runtime_config = with_sequence_tensors(model, config.controls, config.states)
        """The config of `model` with the tensors of its sequences, as runtimes see it."""
        self.id_control = by_kind.get(ControlKind.ID)
        """The tensor that tells the model the sequence's id, if there is one."""
        self.iterative = config.slots.iterative
        self.tells_idle_rows = ControlKind.READY in by_kind and config.slots.fixed_rows
        """The model is told of rows without a request, and knows them by a control."""
        self.state_outputs = tuple(state.output for state in config.states)
        self._batched = model.max_batch_size > 0

    # Requests

    def read_flags(self, request: InferRequest, batch_size: int) -> SequenceFlags:
        """The sequence of a request; of an iterative model that is the request alone, and it may be without an id.
        Raises `InvalidArgument` for a request that can be in no sequence of this model."""
        if batch_size != 1:
            message = "must specify batch-size 1 due to requirements of sequence batcher"
            raise InvalidArgument(f"inference request to model '{self.runtime_config.name}' {message}")
        sequence_id = self._read_id(request)
        start, end = (_read_flag(request, f"sequence_{name}") for name in ("start", "end"))
        return SequenceFlags(sequence_id, start or not sequence_id, end and not self.iterative)

    def _read_id(self, request: InferRequest) -> SequenceId:
        model = self.runtime_config.name
        control = self.id_control
        sequence_id = request.parameters.get("sequence_id", 0)
        if isinstance(sequence_id, bool) or not isinstance(sequence_id, (int, str)):
            raise _refuse(request, f"parameter 'sequence_id' must be an integer or a string, got {sequence_id!r}")
        if not sequence_id and self.iterative:
            return "" if control is not None and control.datatype == "BYTES" else 0
        if not sequence_id:
            message = f"inference request to model '{model}' must specify a non-zero or non-empty correlation ID"
            raise InvalidArgument(message, field="sequence_id")
        if control is None:
            return sequence_id
        name = control.name
        datatype = control.datatype
        if isinstance(sequence_id, str) != (datatype == "BYTES"):
            kind = "BYTES" if isinstance(sequence_id, str) else "UINT64"
            expected = f"but model '{model}' expects '{datatype}'"
            raise _refuse(request, f"sequence batching control '{name}' data-type is '{kind}', {expected}")
        if isinstance(sequence_id, int) and not -(1 << 63) <= sequence_id < 1 << 64:
            raise _refuse(request, f"sequence id {sequence_id} has more than 64 bits")
        return sequence_id

    def mark_warm_up(self, job: InferenceJob) -> None:
        """Make a warm-up job the only request of a sequence."""
        text = self.id_control is not None and self.id_control.datatype == "BYTES"
        job.sequence_flags = SequenceFlags("warmup" if text else 1, start=True, end=not self.iterative)
        job.sequence = SequenceContext(job.sequence_flags.id)

    # Batches

    def arrange_rows(self, jobs: Sequence[InferenceJob]) -> Sequence[InferenceJob]:
        """The rows of a batch. With fixed rows, all up to the last that has a request; an idle one is a job without a
        sequence, with zeros of the first job's shapes."""
        if not self.config.slots.fixed_rows:
            return jobs
        by_row = {job.sequence.row: job for job in jobs if job.sequence is not None}
        count = max(by_row) + 1
        if count == len(jobs):
            return [by_row[row] for row in range(count)]
        zeros = {name: zero_array(array.shape, array.dtype) for name, array in jobs[0].inputs.items()}
        idle = InferenceJob(zeros, ())
        return [by_row.get(row, idle) for row in range(count)]

    def sequence_inputs(self, jobs: Sequence[InferenceJob]) -> dict[str, NDArray[Any]]:
        """The controls and states of a batch. What is left of a sequence that starts anew is forgotten."""
        for job in jobs:
            if job.sequence is not None and job.sequence_flags is not None and job.sequence_flags.start:
                job.sequence.states = {}
        inputs = {state.input: _state_input(state, jobs) for state in self.config.states}
        for control in self.config.controls:
            values = [_control_value(control, job.sequence_flags) for job in jobs for _ in range(job.batch_size)]
            array = np.array(values, NUMPY_TYPES[control.datatype])
            inputs[control.name] = array[:, np.newaxis] if self._batched else array
        return inputs

    def store_states(self, jobs: Sequence[InferenceJob], outputs: Sequence[Arrays]) -> None:
        """Keep the states that each job's outputs leave its sequence, all of them or, after an error, none; one that a
        job has no output for stays. Raises `Internal` if a state has another type or shape than its config says."""
        states_of_jobs = [
            {
                state.input: self._checked(state, part[state.output])
                for state in self.config.states
                if state.output in part
            }
            for part in outputs
        ]
        for job, states in zip(jobs, states_of_jobs, strict=True):
            if job.sequence is not None and job.sequence_flags is not None:
                if len(jobs) > 1:  # a view would keep the whole batch in memory
                    states = {name: array.copy() for name, array in states.items()}
                job.sequence.states = {} if job.sequence_flags.end else {**job.sequence.states, **states}

    def _checked(self, state: StateTensor, array: NDArray[Any]) -> NDArray[Any]:
        shape = array.shape[1:] if self._batched else array.shape
        fits = len(shape) == len(state.dims) and all(
            dim in (-1, size) for dim, size in zip(state.dims, shape, strict=True)
        )
        if array.dtype != np.dtype(NUMPY_TYPES[state.datatype]) or not fits:
            form = f"{array.dtype} of shape {list(array.shape)}"
            raise Internal(f"state '{state.output}' came as {form}, not {state.datatype} of dims {list(state.dims)}")
        return array


def read_sequence_support(
    config: ModelConfig, initial: Mapping[str, Tensor], by_request: bool = False
) -> SequenceSupport | None:
    """None for a model without `sequence_batching`. Takes and raises what `read_sequence_config` does."""
    sequences = read_sequence_config(config, initial, by_request)
    return None if sequences is None else SequenceSupport(sequences, config)


def state_shapes(states: Sequence[StateTensor], job: InferenceJob) -> tuple[tuple[int, ...], ...]:
    """The shapes of the states that the job's request will get."""
    return tuple(_kept_state(state, job).shape for state in states)


def _control_value(control: ControlTensor, flags: SequenceFlags | None) -> Any:
    """The value for one row; `flags` None for an idle one."""
    if control.kind is ControlKind.ID:
        if flags is None:
            return b"" if control.datatype == "BYTES" else 0
        if isinstance(flags.id, str):
            return flags.id.encode()
        # As Triton's: its low bytes, where the control has fewer. The sequence is known by all of them.
        return np.uint64(flags.id % (1 << 64)).astype(NUMPY_TYPES[control.datatype])
    if flags is None:
        return control.values[False]
    holds = control.kind is ControlKind.READY or (flags.start if control.kind is ControlKind.START else flags.end)
    return control.values[int(holds)]


def _state_input(state: StateTensor, jobs: Sequence[InferenceJob]) -> NDArray[Any]:
    kept = [None if job.sequence is None else _kept_state(state, job) for job in jobs]
    first = next(array for array in kept if array is not None)
    arrays = [zero_array(first.shape, first.dtype) if array is None else array for array in kept]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _kept_state(state: StateTensor, job: InferenceJob) -> NDArray[Any]:
    """The state that the sequence's last request left; for its first one, the initial state."""
    started = job.sequence is None or job.sequence_flags is None or job.sequence_flags.start
    kept = {} if started or job.sequence is None else job.sequence.states
    if state.input in kept:
        return kept[state.input]
    return state.initial if job.batch_size == 1 else np.repeat(state.initial, job.batch_size, axis=0)


def _read_flag(request: InferRequest, name: str) -> bool:
    value = request.parameters.get(name, False)
    if not isinstance(value, bool):
        raise _refuse(request, f"parameter '{name}' must be true or false, got {value!r}", name)
    return value


def _refuse(request: InferRequest, message: str, field: str = "sequence_id") -> InvalidArgument:
    return InvalidArgument(f"{request_id_prefix(request.id)}{message}", field=field)
