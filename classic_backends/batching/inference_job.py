"""One request of a classic model as an execution sees it: tensors, and its sequence."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from numpy.typing import NDArray

SequenceId: TypeAlias = int | str


class SequenceFlags(NamedTuple):
    """The parameters of a request that place it in its sequence. `start`: it is the first; `end`: it is the last."""

    id: SequenceId
    start: bool = False
    end: bool = False


@dataclass(slots=True, eq=False)
class SequenceContext:
    """One open sequence, as its instance sees it.

    `row`: its row in the batches of a model with fixed rows, set before its first request is handed over. `states`:
    state tensors that its last request left, by the input that takes them next; only the instance's thread touches
    them while a request of the sequence runs.
    """

    id: SequenceId
    row: int = 0
    states: Mapping[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class InferenceJob:
    """The inputs of one request in the model's shapes, and its requested outputs (None: all).

    For stateful models, `sequence_flags` as the request gave them, and `sequence` once it is known; without it, the job
    is an idle row of a batch.
    """

    inputs: Mapping[str, NDArray[Any]]
    requested_outputs: Sequence[str] | None = None
    sequence_flags: SequenceFlags | None = None
    sequence: SequenceContext | None = None

    @property
    def batch_size(self) -> int:
        """Its items in a batch, at least 1."""
        return len(next(iter(self.inputs.values()))) if self.inputs else 1
