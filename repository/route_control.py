"""The one place where routes change: their files and requests, each change whole or not at all.

What `routes.yaml` says is remembered beside what a request made of it, so that a route follows its file whenever that
says something new about it, now or after a restart, and is otherwise as the last request left it.
"""

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import msgspec

from ..core.errors import CharoniaError, Conflict, InvalidArgument, NotFound, Unsupported, describe_validation_error
from ..core.traffic import RouteEntry
from ..routing.route import Route
from .catalog import RepositoryCatalog
from .lifecycle import ModelLifecycle
from .route_file import ROUTES_FILE, check_observed, check_route
from .route_table import RouteTable
from .routed_versions import RoutedVersions
from .state_directory import StateDirectory

log = logging.getLogger(__name__)

_STATE = "routes"
_MAX_ROUTES = 1000
"""The most routes of files and of requests together: each is a series of metrics, and all are kept with each change."""


class RouteRecord(msgspec.Struct, frozen=True):
    """The state of one name. `version` grows with each change; `file`: what the files said of it at the time; `route`:
    what is served. None for no route. `changed_by`: who changed it last."""

    version: int
    file: Route | None
    route: Route | None
    changed_by: str


class RouteRecords(msgspec.Struct, frozen=True):
    """All that is kept of routes. `forgotten`: the highest version of those that are gone: a new one's is above it."""

    routes: dict[str, RouteRecord] = {}
    forgotten: int = 0


class RouteControl:
    """Lists and changes the routes that `table` serves. `state`: where changes by requests are kept; without it there
    are none. Lives in one event loop."""

    def __init__(
        self,
        table: RouteTable,
        lifecycle: ModelLifecycle,
        catalog: RepositoryCatalog,
        state: StateDirectory | None = None,
    ) -> None:
        self._table = table
        self._lifecycle = lifecycle
        self._catalog = catalog
        self._state = state
        self.versions = RoutedVersions(table, lifecycle, catalog)
        self._records = RouteRecords()
        self._changing = asyncio.Lock()

    def restore(self, files: Mapping[str, Route]) -> None:
        """Serve what the files say, and what requests made of that before the server's start. Blocks.

        Raises:
            InvalidArgument: what was kept is damaged, there are too many routes, or a file's has what no extension
                serves.
            Internal: it cannot be written.
        """
        self._check_observed(files)
        kept = None if self._state is None else self._state.read(_STATE, RouteRecords)
        records = _followed(kept or RouteRecords(), files, complete=not self._catalog.unknown)
        _check_count(records)
        if self._state is not None and records != kept:
            self._state.write(_STATE, records)
        self._serve(records)
        self._warn_of_strangers()

    async def follow_files(self, files: Mapping[str, Route]) -> None:
        """Serve what the files say now of routes of which they said something else before.

        Raises:
            InvalidArgument: they name versions that are not served, of models that are, there are too many of them, or
                one has what no extension serves; the routes stay as they are.
            Internal: it cannot be kept; the same.
        """
        self._check_observed(files)
        async with self._changing:
            records = _followed(self._records, files)
            before = self._records.routes
            for name, record in records.routes.items():
                if record.route is not None and record != before.get(name):
                    for model, numbers in self.versions.missing(record.route).items():
                        raise InvalidArgument(f"route '{name}': version {numbers[0]} of model '{model}' is not served")
            await self._keep_and_serve(records)
            for name in sorted({*before, *records.routes}):
                old, new = before.get(name), records.routes.get(name)
                if (old and old.route) != (new and new.route):
                    log.info("route '%s' is %s", name, f"as its file has it now: {_said(new)}" if new else "gone")

    # For endpoints

    def entries(self) -> list[RouteEntry]:
        """Every route, by name."""
        return [self.entry(name) for name, record in sorted(self._records.routes.items()) if record.route is not None]

    def entry(self, name: str) -> RouteEntry:
        """Raises `NotFound`."""
        record = self._find(name)
        return RouteEntry(name, record.version, msgspec.to_builtins(record.route), record.changed_by)

    def route(self, name: str) -> tuple[Route, int]:
        """A route as it is served, and its version. Raises `NotFound`."""
        record = self._find(name)
        assert record.route is not None
        return record.route, record.version

    async def put_document(self, name: str, document: Any, who: str, expect: int | None = None) -> RouteEntry:
        """As `put`, of a route as `routes.yaml` has it. Raises `InvalidArgument` if it is none."""
        try:
            route = msgspec.convert(document, Route)
        except msgspec.ValidationError as error:
            wrong = describe_validation_error(error)
            place = f"{wrong.path} " if wrong.path else ""
            raise InvalidArgument(f"route '{name}': {place}{wrong}", field=wrong.path or "route") from None
        await self.put(name, route, who, expect)
        return self.entry(name)

    async def put(self, name: str, route: Route, who: str, expect: int | None = None) -> int:
        """Serve a route by that name from now on, new or in place of the one of that name; its version.

        Versions that it names are loaded before. `who` is told in the log. `expect`: the version that it has now, 0 for
        none. Once begun, it ends, whatever becomes of the task that waits for it.

        Raises:
            Unsupported: the server has no `--state-dir`.
            InvalidArgument: its file would be refused for the same, a version cannot be loaded, or routes are too many.
            Conflict: the route is at another version than was expected.
            Internal: it cannot be kept.
        """
        return await self._lifecycle.run_to_completion(self._put(name, route, who, expect))

    async def delete(self, name: str, who: str, expect: int | None = None) -> None:
        """Serve no route by that name. Raises `NotFound` if there is none, and as `put` does."""
        self._check_changeable()
        await self._lifecycle.run_to_completion(self._change(name, None, who, expect))

    async def _put(self, name: str, route: Route, who: str, expect: int | None) -> int:
        self._check_changeable()
        self._expected(name, expect)
        if name not in self._table.served and len(self._table.served) >= _MAX_ROUTES:
            raise _too_many(_MAX_ROUTES + 1)
        self._check_observed({name: route})
        check_route(name, route, self._table.served, await asyncio.to_thread(self._catalog.servable_names, route))
        try:
            with self.versions.coming([route]):
                await self.versions.provide(route)
                return await self._change(name, route, who, expect)
        except CharoniaError:
            self.versions.release_later(route)
            raise

    def _check_changeable(self) -> None:
        if self._state is None:
            message = "requests may not change routes of this server: it would have to run with --state-dir DIRECTORY"
            raise Unsupported(f"{message}, or read them of {ROUTES_FILE} in mode poll")

    async def _change(self, name: str, route: Route | None, who: str, expect: int | None) -> int:
        async with self._changing:
            before = self._expected(name, expect)
            if route is None:
                self._find(name)
            elif route == before.route:
                return before.version
            else:
                difference = self._table.difference(name, route)
                if difference:
                    raise InvalidArgument(f"route '{name}': {difference}", field="arms")
            record = RouteRecord(before.version + 1, before.file, route, who)
            records = {**self._records.routes, name: record}
            await self._keep_and_serve(_tidied(records, self._records.forgotten))
            log.info("route '%s', version %d, by %s: %s -> %s", name, record.version, who, _said(before), _said(record))
            if before.route is not None:
                self.versions.release_later(before.route)
            return record.version

    def _expected(self, name: str, expect: int | None) -> RouteRecord:
        """The record of a name, an empty one if there is none. Raises `Conflict` if it is at another version."""
        record = self._records.routes.get(name) or RouteRecord(self._records.forgotten, None, None, "")
        version = 0 if record.route is None else record.version
        if expect is not None and expect != version:
            state = f"at version {version}" if version else "not there"
            raise Conflict(f"route '{name}' is {state}, and version {expect} was expected", field="version")
        return record

    async def _keep_and_serve(self, records: RouteRecords) -> None:
        if records != self._records:
            _check_count(records)
            if self._state is not None:
                await asyncio.to_thread(self._state.write, _STATE, records)
            self._serve(records)

    def _serve(self, records: RouteRecords) -> None:
        self._records = records
        routes = {name: record.route for name, record in records.routes.items()}
        self._table.replace({name: route for name, route in routes.items() if route is not None})

    def _find(self, name: str) -> RouteRecord:
        record = self._records.routes.get(name)
        if record is None or record.route is None:
            raise NotFound(f"there is no route '{name}'", field="name")
        return record

    def _check_observed(self, routes: Mapping[str, Route]) -> None:
        for name, route in routes.items():
            check_observed(name, route, self._table.observed_fields)

    def _warn_of_strangers(self) -> None:
        """Tell of routes that were kept and name what is not there any more; they are served, as far as they can be."""
        for name, served in self._table.served.items():
            try:
                if self._records.routes[name].file != served.route:
                    self._check_observed({name: served.route})
                    check_route(name, served.route, self._table.served, self._catalog.servable_names(served.route))
            except CharoniaError as error:
                log.warning("%s; it was kept in --state-dir, and is served as far as it can be", error.message)


def _followed(records: RouteRecords, files: Mapping[str, Route], complete: bool = True) -> RouteRecords:
    """The records where files say something else than before of some names; unless all files are `complete`ly known,
    what they do not name stays."""
    followed = dict(records.routes)
    for name in sorted({*files, *followed} if complete else files):
        file, record = files.get(name), followed.get(name)
        if record is None:
            followed[name] = RouteRecord(records.forgotten + 1, file, file, ROUTES_FILE)
        elif record.file != file:
            if record.route not in (record.file, file):
                message = "route '%s': its file was changed, and takes the place of what %s had made of it: %s"
                log.warning(message, name, record.changed_by, _said(record))
            followed[name] = RouteRecord(record.version + (record.route != file), file, file, ROUTES_FILE)
    return _tidied(followed, records.forgotten)


def _check_count(records: RouteRecords) -> None:
    """Raises `InvalidArgument` for too many routes."""
    served = sum(record.route is not None for record in records.routes.values())
    if served > _MAX_ROUTES:
        raise _too_many(served)


def _too_many(count: int) -> InvalidArgument:
    return InvalidArgument(
        f"{count} routes, of {ROUTES_FILE} and of requests, are more than there may be: {_MAX_ROUTES}"
    )


def _tidied(records: dict[str, RouteRecord], forgotten: int) -> RouteRecords:
    """Without those of which nothing says anything any more."""
    gone = [record.version for record in records.values() if record.route is None and record.file is None]
    kept = {name: record for name, record in records.items() if record.route is not None or record.file is not None}
    return RouteRecords(kept, max([forgotten, *gone]))


def _said(record: RouteRecord | None) -> str:
    return "nothing" if record is None or record.route is None else str(record.route)
