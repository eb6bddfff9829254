"""The work that one request asks of a classic model: its tensors, and its place in a sequence."""

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
    """One open sequence, as its instance sees it."""

    id: SequenceId
    row: int = 0
    """Its row in the batches of a model with fixed rows, set before its first request is handed over."""
    states: Mapping[str, NDArray[Any]] = field(default_factory=dict)
    """State tensors that its last request left, by the input that takes them next. Only the instance's thread touches
    them while a request of the sequence runs."""


@dataclass(slots=True, eq=False)
class InferenceJob:
    """The inputs of one request in the model's shapes, and the outputs that it wants."""

    inputs: Mapping[str, NDArray[Any]]
    requested_outputs: Sequence[str] | None = None
    """None: all of them."""
    sequence_flags: SequenceFlags | None = None
    """The flags of a stateful model's request, as it gave them."""
    sequence: SequenceContext | None = None
    """The sequence of a stateful model's request, once it is known; a job without it is an idle row of a batch."""

    @property
    def batch_size(self) -> int:
        """The number of its items in a batch, at least 1."""
        return len(next(iter(self.inputs.values()))) if self.inputs else 1
