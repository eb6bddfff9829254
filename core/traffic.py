"""The routes of a server, names that stand for several models: what is shown of them, and how they are changed while
they serve."""

from collections.abc import Mapping
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
