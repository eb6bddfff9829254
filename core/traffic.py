"""The routes of a server, which are names that stand for several models: how they are shown and changed."""

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol


class RouteEntry(NamedTuple):
    """A served route as in `routes.yaml`. Its version grows with each change."""

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
        """Serve a route, as in `routes.yaml`, from now on; `who` is logged.

        Raises:
            Unsupported: requests may not change routes.
            InvalidArgument: the route is wrong.
            Conflict: the route's version is not `expect`; 0 expects none.
            Internal: it cannot be stored.
        """

    async def delete(self, name: str, who: str, expect: int | None = None) -> None:
        """Remove a route. Raises `NotFound`, and as `put_document` does."""
