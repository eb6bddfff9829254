"""What a scheduler has counted so far."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..core.metrics import SequenceState


@dataclass(slots=True)
class SchedulerTotals:
    """Sequences preempted, prompt tokens looked up in the prefix cache, found there, and found there in the host's
    memory; tokens that were computed again after a preemption; prompt tokens whose blocks were found, but no state to
    go on from; and the seconds of steps that sequences spent in each state, all of them together."""

    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    restored: int = 0
    recomputed_tokens: int = 0
    state_misses: int = 0
    sequence_seconds: dict[str, float] = field(default_factory=dict)

    def count_seconds(self, states: Mapping[SequenceState, int], seconds: float) -> None:
        """A step took so long, while so many sequences were in each state."""
        for state, count in states.items():
            self.sequence_seconds[state.value] = self.sequence_seconds.get(state.value, 0.0) + count * seconds
