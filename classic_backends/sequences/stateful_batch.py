"""The batches of a stateful model: idle rows, control tensors, and state from request to request.

Runs in the thread of an instance. Knows nothing of which sequences are open.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import Internal
from ...core.tensor import NUMPY_TYPES, zero_array
from ..batching.queued_request import InferenceJob, SequenceFlags
from ..runtime import Arrays
from .sequence_tensors import ControlKind, ControlTensor, StateTensor


class StatefulLayout(NamedTuple):
    """A `batch_execution.SequenceLayout`. `batched`: tensors have a batch dimension; `fixed_rows`: each sequence has
    its own row."""

    batched: bool
    fixed_rows: bool = False
    controls: tuple[ControlTensor, ...] = ()
    states: tuple[StateTensor, ...] = ()

    @property
    def state_outputs(self) -> tuple[str, ...]:
        return tuple(state.output for state in self.states)

    def arrange_rows(self, jobs: Sequence[InferenceJob]) -> Sequence[InferenceJob]:
        """The rows of a batch. With fixed rows, all up to the last that has a request; an idle one is a job without a
        sequence, with zeros of the first job's shapes."""
        if not self.fixed_rows:
            return jobs
        by_row = {job.sequence.row: job for job in jobs if job.sequence is not None}
        count = max(by_row) + 1
        if count == len(jobs):
            return [by_row[row] for row in range(count)]
        zeros = {name: zero_array(array.shape, array.dtype) for name, array in jobs[0].inputs.items()}
        idle = InferenceJob(zeros, ())
        return [by_row.get(row, idle) for row in range(count)]

    def sequence_inputs(self, jobs: Sequence[InferenceJob]) -> dict[str, NDArray[Any]]:
        """The controls and states of a batch."""
        controls = {control.name: self._control_input(control, jobs) for control in self.controls}
        return controls | {state.input: _state_input(state, jobs) for state in self.states}

    def _control_input(self, control: ControlTensor, jobs: Sequence[InferenceJob]) -> NDArray[Any]:
        values = [_control_value(control, job.sequence_flags) for job in jobs for _ in range(job.batch_size)]
        array = np.array(values, NUMPY_TYPES[control.datatype])
        return array[:, np.newaxis] if self.batched else array

    def store_states(self, jobs: Sequence[InferenceJob], outputs: Sequence[Arrays]) -> None:
        """Keep the states that each job's outputs leave its sequence: all of them or, after an error, none.

        Raises:
            Internal: a state has another type or shape than its config says.
        """
        copy = len(jobs) > 1
        states = [{state.input: self._checked(state, part[state.output]) for state in self.states} for part in outputs]
        for job, arrays in zip(jobs, states, strict=True):
            if job.sequence is not None and job.sequence_flags is not None:
                # A view would keep the whole batch in memory.
                kept = {name: array.copy() if copy else array for name, array in arrays.items()}
                job.sequence.states = {} if job.sequence_flags.end else kept

    def _checked(self, state: StateTensor, array: NDArray[Any]) -> NDArray[Any]:
        shape = array.shape[1:] if self.batched else array.shape
        fits = len(shape) == len(state.dims) and all(
            dim in (-1, size) for dim, size in zip(state.dims, shape, strict=True)
        )
        if array.dtype != np.dtype(NUMPY_TYPES[state.datatype]) or not fits:
            made = f"{array.dtype} of shape {list(array.shape)}"
            raise Internal(f"state '{state.output}' came as {made}, not {state.datatype} of dims {list(state.dims)}")
        return array


def _control_value(control: ControlTensor, flags: SequenceFlags | None) -> Any:
    """The value for one row; `flags` None for an idle one."""
    if control.kind is ControlKind.ID:
        if flags is None:
            return b"" if control.datatype == "BYTES" else 0
        return flags.id.encode() if isinstance(flags.id, str) else flags.id
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


def state_shapes(states: Sequence[StateTensor], job: InferenceJob) -> tuple[tuple[int, ...], ...]:
    """The shapes of the states that the job's request will get."""
    return tuple(_kept_state(state, job).shape for state in states)
