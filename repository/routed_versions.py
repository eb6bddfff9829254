"""The versions that routes name: they are loaded, and stay, beside those that `version_policy` serves."""

import asyncio
import logging
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from ..core.errors import InvalidArgument
from ..routing.route import Route
from .catalog import RepositoryCatalog
from .lifecycle import LoadFailure, ModelLifecycle
from .model_registry import ModelEntry
from .model_source import ModelSource, VersionSource
from .route_table import RouteTable

log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
"""Between looks whether sequences of a version go on."""


class RoutedVersions:
    """Tells the catalog which versions routes name, those that are about to be served too, and loads and unloads them.
    Lives in one event loop."""

    def __init__(self, table: RouteTable, lifecycle: ModelLifecycle, catalog: RepositoryCatalog) -> None:
        self._table = table
        self._lifecycle = lifecycle
        self._catalog = catalog
        self._registry = table.registry
        self._coming: tuple[Route, ...] = ()
        self._releases: set[asyncio.Task[None]] = set()
        catalog.routed_versions = self.of

    def of(self, model: str) -> frozenset[int]:
        """The versions of a model that routes stand for, and those where sequences of a route go on. From any
        thread."""
        return self._named(model) | {int(number) for number in self._table.open_versions(model)}

    def _named(self, model: str) -> frozenset[int]:
        routes = (*self._coming, *(served.route for served in self._table.served.values()))
        targets = (target for route in routes for target in route.targets)
        return frozenset(target.version for target in targets if target.model == model and target.version)

    @contextmanager
    def coming(self, routes: Iterable[Route]) -> Iterator[None]:
        """Count what these routes name during the block, at whose end they are served, or will not be."""
        added = tuple(routes)
        self._coming += added
        try:
            yield
        finally:
            left = list(self._coming)
            for route in added:
                left.remove(route)
            self._coming = tuple(left)

    def missing(self, route: Route) -> dict[str, list[str]]:
        """The versions that a route names and that are not served, by models of which others are."""
        missing: dict[str, dict[str, None]] = {}
        for target in route.targets:
            entry = self._registry.find(target.model)
            served = [] if entry is None else entry.served_versions
            if target.version and served and str(target.version) not in served:
                missing.setdefault(target.model, {})[str(target.version)] = None
        return {model: list(numbers) for model, numbers in missing.items()}

    async def provide(self, route: Route) -> None:
        """Load the versions that a route names, of models that are served; the others of them stay as they are.

        Raises:
            InvalidArgument: one is not there or fails to load, for want of memory too, whose bytes are told.
        """
        for model, numbers in self.missing(route).items():
            await self._lifecycle.refresh(self._catalog)
            source, release = await self._lifecycle.read(self._catalog, model)
            try:
                entry = self._registry.entries[source.name]
                wanted = _beside(entry, source, numbers)
            except BaseException:
                release()
                raise
            try:
                if entry.loaded_versions:
                    await self._lifecycle.load(wanted, release=release)
                else:  # its requests load it
                    await self._lifecycle.describe(wanted, release)
            except LoadFailure as failure:
                log.error("model '%s' failed to load for a route: version %s: %s", model, failure.version, failure)
                raise InvalidArgument(f"version {failure.version} of model '{model}': {failure}") from None

    def release_later(self, route: Route) -> None:
        """Unload what a route named that is served no more, and no other names, once its sequences have ended."""
        for model in {target.model for target in route.targets if target.version}:
            task = asyncio.create_task(self._release(model))
            self._releases.add(task)
            task.add_done_callback(self._releases.discard)

    async def _release(self, model: str) -> None:
        while self._unnamed(model):
            await self._lifecycle.unload_versions(
                model, lambda: self._unnamed(model) - self._table.open_versions(model)
            )
            if self._unnamed(model):
                await asyncio.sleep(_LOOK_SECONDS)

    def _unnamed(self, model: str) -> frozenset[str]:
        """The versions that are served for routes, none of which names them any more."""
        entry, named = self._registry.entries.get(model), self._named(model)
        served = [] if entry is None else entry.served_versions
        return frozenset(number for number in served if entry and number in entry.routed and int(number) not in named)


def _beside(entry: ModelEntry, source: ModelSource, numbers: Collection[str]) -> ModelSource:
    """The source of these versions and of those that are served, which stay as they are. Raises `InvalidArgument` for
    one that is not there."""
    there = {version.number: version for version in source.versions}
    absent = [number for number in numbers if number not in there]
    if absent:
        raise InvalidArgument(f"model '{source.name}' has no version {absent[0]}")
    served = [there.get(number, VersionSource(number, "")) for number in entry.served_versions]
    marks = {number: model.source_mark for number, model in entry.loaded_versions.items()}
    kept = [replace(version, mark=marks.get(version.number, version.mark)) for version in served]
    versions = sorted([*kept, *(there[number] for number in numbers)], key=lambda version: int(version.number))
    routed = frozenset({*entry.routed, *numbers})
    return replace(source, versions=tuple(versions), pinned=entry.pinned or source.pinned, routed=routed)
