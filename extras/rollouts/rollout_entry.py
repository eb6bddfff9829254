"""What is kept of a route's rollout, and what is shown of it."""

import time
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from ...routing.route import Route
from .rollout import RolloutPlan, with_all, with_share

_MAX_EVENTS = 64


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


class RolloutRecord(msgspec.Struct, frozen=True):
    """What is kept of a route's last rollout. `before`: the route that it goes back to."""

    plan: RolloutPlan
    before: Route
    started_by: str
    began_at: float
    state: RolloutState = RolloutState.RUNNING
    step: int = 0
    reason: str = ""
    ended_at: float | None = None
    events: tuple[RolloutEvent, ...] = ()

    @property
    def route(self) -> Route | None:
        """As the rollout leaves it now; None for as it is."""
        if self.state is RolloutState.SUPERSEDED:
            return None
        if self.state is RolloutState.RUNNING:
            return with_share(self.before, self.plan.to, self.plan.steps[self.step])
        return with_all(self.before, self.plan.to) if self.state is RolloutState.FORWARD else self.before

    def is_own(self, route: Route) -> bool:
        """Whether the rollout made the route what it is, or found it so."""
        shares = (with_share(self.before, self.plan.to, percent) for percent in self.plan.steps)
        return route in (self.before, with_all(self.before, self.plan.to), *shares)

    def after(self, text: str, **changes: Any) -> "RolloutRecord":
        """The record with an event more, and what it changed."""
        events = (*self.events, RolloutEvent(time.time(), text))[-_MAX_EVENTS:]
        return msgspec.structs.replace(self, events=events, **changes)


class RolloutRecords(msgspec.Struct, frozen=True):
    """The records by the names of their routes."""

    rollouts: dict[str, RolloutRecord] = {}


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
