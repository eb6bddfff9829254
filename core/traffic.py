"""The routes of a server, names that stand for several models, and their rollouts: what is shown of them, and how they
are changed while they serve."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple, Protocol


class RouteEntry(NamedTuple):
    """A route that is served. `route`: as `routes.yaml` has it; `version`: grows with each change."""

    name: str
    version: int
    route: Mapping[str, Any]
    changed_by: str


class ChangeableRoutes(Protocol):
    """The routes of the server, for endpoints that list and change them."""

    def entries(self) -> list[RouteEntry]:
        """Every route, by name."""

    def entry(self, name: str) -> RouteEntry:
        """Raises `NotFound`."""

    async def put_document(self, name: str, document: Any, who: str, expect: int | None = None) -> RouteEntry:
        """Serve a route, as `routes.yaml` has it, by that name from now on; `who` is told in the log.

        Raises:
            Unsupported: requests may not change routes.
            InvalidArgument: it is no route, or one that its file would be refused for.
            Conflict: the route is at another version than `expect`, 0 for none.
            Internal: it cannot be kept.
        """

    async def delete(self, name: str, who: str, expect: int | None = None) -> None:
        """Serve no route by that name. Raises `NotFound` if there is none, and as `put_document` does."""


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


class Rollouts(Protocol):
    """The rollouts of the server's routes, for endpoints that start and end them."""

    def rollout(self, name: str) -> RolloutEntry:
        """The last rollout of a route. Raises `NotFound` if there was none."""

    async def start(self, name: str, document: Any, who: str) -> RolloutEntry:
        """Begin a rollout of a route. `document`: its plan in JSON; `who` is told in the log.

        Raises:
            Unsupported: requests may not change routes.
            NotFound: there is no such route, or no such version.
            InvalidArgument: it is no plan, or one for which the route would be refused.
            Conflict: the route has one already, or was changed at the same time.
            Internal: it cannot be kept.
        """

    async def abort(self, name: str, who: str) -> RolloutEntry:
        """End the rollout that a route has, and go back. Raises `NotFound`, `Conflict` if none runs, and `Internal`."""
