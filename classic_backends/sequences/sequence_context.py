"""What goes along with the requests of one sequence, from the event loop into the thread of its instance."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from numpy.typing import NDArray

SequenceId: TypeAlias = int | str


class SequenceFlags(NamedTuple):
    """What a request says of its sequence. `start`: it begins it; `end`: it is the last one."""

    id: SequenceId
    start: bool = False
    end: bool = False


@dataclass(slots=True, eq=False)
class SequenceContext:
    """One open sequence, as its instance sees it. `row`: in the batches of a model that pins them, set before the first
    request is handed over. `states`: what its last request left, by the input that they are next; the thread of the
    instance alone touches them, and nobody else while a request of the sequence runs."""

    id: SequenceId
    row: int = 0
    states: Mapping[str, NDArray[Any]] = field(default_factory=dict)
