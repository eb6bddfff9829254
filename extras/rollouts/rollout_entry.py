"""What is shown of a route's rollout."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple


class RolloutState(StrEnum):
    """How a rollout is going, or ended. `SUPERSEDED`: somebody changed its route."""

    RUNNING = "running"
    FORWARD = "forward"
    BACK = "back"
    ABORTED = "aborted"
    SUPERSEDED = "superseded"


class RolloutEvent(NamedTuple):
    """`at`: seconds since the epoch."""

    at: float
    text: str


class RolloutEntry(NamedTuple):
    """The last rollout of a route. `to`: its new arm, which has `steps[step]` per cent of the requests, or had when it
    ended; `progress`: what the step still waits for; `reason`: why it ended. Times are in seconds since the epoch."""

    name: str
    to: str
    state: RolloutState
    step: int
    steps: Sequence[float]
    progress: str
    reason: str
    plan: Mapping[str, Any]
    started_by: str
    began_at: float
    ended_at: float | None
    events: Sequence[RolloutEvent]
