"""A batch of a stateful model: rows that wait for their sequence, control tensors, and state from request to request.

Runs in the thread of an instance. Knows nothing of which sequences there are, and when they end.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.errors import Internal
from ...core.tensor import NUMPY_TYPES, zero_array
from ..batching.inference_job import InferenceJob, NullSink
from ..runtime import Arrays
from .sequence_context import SequenceFlags
from .sequence_tensors import ControlKind, ControlTensor, StateTensor

_NOBODY = NullSink()


class StatefulLayout(NamedTuple):
    """How requests of sequences become a batch, beside what is so for all. `batched`: tensors have a batch dimension in
    front; `pinned`: each sequence has its own row."""

    batched: bool
    fixed_rows: bool = False
    controls: tuple[ControlTensor, ...] = ()
    states: tuple[StateTensor, ...] = ()

    @property
    def state_outputs(self) -> tuple[str, ...]:
        """Outputs that are read though nobody asks for them."""
        return tuple(state.output for state in self.states)

    def arrange_rows(self, jobs: Sequence[InferenceJob]) -> Sequence[InferenceJob]:
        """The rows of a batch: where sequences are pinned, all up to the last that has a request; idle ones are jobs
        without a context, like the first in shape."""
        if not self.fixed_rows:
            return jobs
        by_row = {job.sequence.row: job for job in jobs if job.sequence is not None}
        count = max(by_row) + 1
        if count == len(jobs):
            return [by_row[row] for row in range(count)]
        idle = InferenceJob({name: _emptied(array) for name, array in jobs[0].inputs.items()}, (), _NOBODY)
        return [by_row.get(row, idle) for row in range(count)]

    def sequence_inputs(self, jobs: Sequence[InferenceJob]) -> dict[str, NDArray[Any]]:
        """What the model gets beside the requests' own tensors."""
        told = {control.name: self._told(control, jobs) for control in self.controls}
        return told | {state.input: _fed(state, jobs) for state in self.states}

    def _told(self, control: ControlTensor, jobs: Sequence[InferenceJob]) -> NDArray[Any]:
        dtype = NUMPY_TYPES[control.datatype]
        flags = [job.sequence_flags for job in jobs for _ in range(job.batch_size)]
        if control.kind is ControlKind.ID:
            array = np.array([_id(control, each) for each in flags], dtype)
        else:
            array = np.array(control.values, dtype)[[_holds(control.kind, each) for each in flags]]
        return array[:, np.newaxis] if self.batched else array

    def store_states(self, jobs: Sequence[InferenceJob], parts: Sequence[Arrays]) -> None:
        """Each sequence takes the state that its part of the outputs leaves it, all of them or none.

        Raises:
            Internal: a state is of another type or shape than its config says.
        """
        alone = len(jobs) == 1
        left = [{state.input: self._state(state, part, alone) for state in self.states} for part in parts]
        for job, states in zip(jobs, left, strict=True):
            if job.sequence is not None and job.sequence_flags is not None:
                job.sequence.states = {} if job.sequence_flags.end else states

    def _state(self, state: StateTensor, part: Arrays, alone: bool) -> NDArray[Any]:
        """A copy of what is a part of something larger, which would be kept with it."""
        array = part[state.output]
        shape = array.shape[1:] if self.batched else array.shape
        fits = len(shape) == len(state.dims) and all(
            dim in (-1, size) for dim, size in zip(state.dims, shape, strict=True)
        )
        if array.dtype != np.dtype(NUMPY_TYPES[state.datatype]) or not fits:
            made = f"{array.dtype} of shape {list(array.shape)}"
            raise Internal(f"state '{state.output}' came as {made}, not {state.datatype} of dims {list(state.dims)}")
        return array if alone else array.copy()


def _id(control: ControlTensor, flags: SequenceFlags | None) -> int | bytes:
    if flags is None:
        return b"" if control.datatype == "BYTES" else 0
    return flags.id.encode() if isinstance(flags.id, str) else flags.id


def _holds(kind: ControlKind, flags: SequenceFlags | None) -> int:
    """0 or 1."""
    if flags is None:
        return 0
    return int(kind is ControlKind.READY or (flags.start if kind is ControlKind.START else flags.end))


def _fed(state: StateTensor, jobs: Sequence[InferenceJob]) -> NDArray[Any]:
    real = next(job for job in jobs if job.sequence is not None)
    shape = _kept(state, real)
    arrays = [_emptied(shape) if job.sequence is None else _kept(state, job) for job in jobs]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _kept(state: StateTensor, job: InferenceJob) -> NDArray[Any]:
    """What the sequence's last request left; the first one gets what the config says."""
    kept = {} if job.sequence is None or job.sequence_flags is None or job.sequence_flags.start else job.sequence.states
    if state.input in kept:
        return kept[state.input]
    return state.initial if job.batch_size == 1 else np.repeat(state.initial, job.batch_size, axis=0)


def state_shapes(states: Sequence[StateTensor], job: InferenceJob) -> tuple[tuple[int, ...], ...]:
    """Of what the job's request would be fed."""
    return tuple(_kept(state, job).shape for state in states)


def _emptied(array: NDArray[Any]) -> NDArray[Any]:
    return zero_array(array.shape, array.dtype)
