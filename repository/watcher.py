"""Loads the models of the repositories: at startup, and in mode poll whenever their files change.

All that there is to load is read first: then models load side by side, as `lifecycle.py` has it.
"""

import asyncio
import logging
from collections.abc import Hashable, Iterable
from typing import Protocol

from ..core.errors import AlreadyExists, CharoniaError
from .backend_registry import OnProgress
from .catalog import RepositoryCatalog
from .lifecycle import LoadFailure, ModelLifecycle, ignore_progress
from .model_registry import ModelRegistry
from .model_source import ModelSource

log = logging.getLogger(__name__)


class LoadListener(Protocol):
    """Hears of models that load: the display of a terminal, or the log."""

    def on_loading(self, name: str) -> OnProgress: ...

    def on_loaded(self, name: str, seconds: float) -> None: ...

    def on_failed(self, name: str, reason: str) -> None: ...


class LoadLogger:
    """A `LoadListener` that writes to the log."""

    def on_loading(self, name: str) -> OnProgress:
        return ignore_progress

    def on_loaded(self, name: str, seconds: float) -> None:
        log.info("model '%s' is ready after %.2f s", name, seconds)

    def on_failed(self, name: str, reason: str) -> None:
        log.error("model '%s' failed to load: %s", name, reason)


class RepositoryWatcher:
    """Keeps the registry as the catalog has it. Remembers the source of each model's last attempt to load."""

    def __init__(self, catalog: RepositoryCatalog, registry: ModelRegistry, lifecycle: ModelLifecycle) -> None:
        self._catalog = catalog
        self._registry = registry
        self._lifecycle = lifecycle
        self._last_tried: dict[str, Hashable] = {}

    async def load_initial(self, names: Iterable[str], watcher: LoadListener) -> bool:
        """Load the models of these names; returns whether all of them did. A failure leaves the others alone."""
        names = list(names)
        for name in names:
            self._registry.get_or_add(name)  # known, and not ready
        return await self._load(names, watcher)

    async def poll(self, every: float) -> None:
        """Poll for changes every so many seconds, for ever."""
        while True:
            await asyncio.sleep(every)
            await self.poll_once(LoadLogger())

    async def poll_once(self, watcher: LoadListener) -> None:
        """Load what is new or has changed, unload what has gone; nothing while a repository cannot be read, which may
        be back the next time."""
        if not await self._lifecycle.run_blocking(self._catalog.is_readable):
            return
        names = await self._lifecycle.run_blocking(self._catalog.model_names)
        await self._load(names, watcher)
        for name in set(self._last_tried) - set(names):
            del self._last_tried[name]
            await self._lifecycle.unload(name)

    async def _load(self, names: Iterable[str], watcher: LoadListener) -> bool:
        """Whether all of them loaded, or had nothing new."""
        found = [await self._read(name, watcher) for name in names]
        async with asyncio.TaskGroup() as group:
            loads = [
                group.create_task(self._load_one(source, watcher))
                for source in found
                if isinstance(source, ModelSource)
            ]
        return all(load.result() for load in loads) and False not in found

    async def _read(self, name: str, watcher: LoadListener) -> ModelSource | bool:
        """What to load; nothing if it is what was tried the last time, and then whether it can be read."""
        try:
            source = await self._lifecycle.run_blocking(self._catalog.read, name)
        except CharoniaError as error:
            if not self._is_changed(name, error.message):
                return True
            entry = self._registry.get_or_add(name)
            if isinstance(error, AlreadyExists):  # who can tell which of them is wanted now?
                await self._lifecycle.unload(name)
                entry.should_serve = True
            entry.record_load_failure(error.message, () if entry.loaded_versions else entry.versions)
            watcher.on_failed(name, error.message)
            return False
        return source if self._is_changed(name, source.versions) else True

    async def _load_one(self, source: ModelSource, watcher: LoadListener) -> bool:
        """Whether it loaded."""
        try:
            seconds = await self._lifecycle.load(source, watcher.on_loading(source.name))
        except (CharoniaError, LoadFailure) as error:
            watcher.on_failed(source.name, load_failure_reason(error))
            return False
        watcher.on_loaded(source.name, seconds)
        return True

    def _is_changed(self, name: str, mark: Hashable) -> bool:
        known = self._last_tried.get(name)
        self._last_tried[name] = mark
        return known is None or known != mark


def load_failure_reason(error: CharoniaError | LoadFailure) -> str:
    """The message of a failed load."""
    cause = error.cause if isinstance(error, LoadFailure) else error
    return cause.message if isinstance(cause, CharoniaError) else f"{type(cause).__name__}: {cause}"
