"""Loads models and takes them out of service again: the new serves before the old goes, and the old until it is done.

Models load side by side as far as there are cores and memory for it. Those that take as much memory as they are granted
divide what is left; what does not fit waits until those that load have said what they need. Where there are GPUs one
loads at a time: what is free there no longer is what it took.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from ..core.errors import CharoniaError, ServerExiting
from ..core.gateway import ModelState
from ..core.model import ConfigDocument, Model
from ..processes.host import usable_cores
from ..telemetry.gpus import usable_gpus
from .backend_registry import OnProgress, fills_granted_memory
from .builder import ModelBuilder, ModelFactory
from .in_flight import InFlightCounter
from .memory_budget import InsufficientMemory
from .model_entry import LoadedModel, ModelEntry, ModelVersion
from .model_registry import ModelRegistry
from .model_source import ModelSource, VersionSource, with_config_position
from .shared_release import SharedRelease, release_both, return_freed_memory
from .unsupported_fields import ignored_field_message, ignored_fields
from .versions import find_misnamed_versions

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_CONCURRENT_LOADS = 4
"""Models that load at once at most: each divides the memory more."""

_UNLOAD_WAIT = 10.0
"""Seconds for which what does not fit waits for the next of those that are leaving to be gone."""


def ignore_progress(phase: str, fraction: float, seconds: float, detail: str) -> None:
    """An `OnProgress` that tells nobody."""


class LoadFailure(Exception):
    """One version of a model did not load, because of `cause`."""

    def __init__(self, version: str, cause: Exception) -> None:
        super().__init__(str(cause))
        self.version = version
        self.cause = cause


class ModelLifecycle:
    """Changes what a registry serves. `grace`: seconds for which a version that another replaced still takes requests
    that ask for it by its number."""

    def __init__(self, registry: ModelRegistry, builder: ModelBuilder, grace: float = 1.0) -> None:
        self._grace = grace
        self._registry = registry
        self._builder = builder
        self._width = 1 if usable_gpus() else min(_MAX_CONCURRENT_LOADS, usable_cores().logical)
        self._slots = asyncio.Semaphore(self._width)
        self._under_way: set[asyncio.Future[None]] = set()
        self._ungranted: set[str] = set()
        self._granting = asyncio.Lock()
        self._asked: set[asyncio.Task[None]] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._hurry = asyncio.Event()
        # One thread for all that blocks: each that ever ran keeps some memory of what it did.
        self._thread = ThreadPoolExecutor(1, "loading")

    async def aside(self, work: Callable[..., T], *arguments: object) -> T:
        """Do what blocks, outside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def see_through(self, change: Coroutine[None, None, None]) -> None:
        """Load or unload for a client: to the end, though the client leaves meanwhile.

        Raises:
            Exiting: it was given up; see `give_up_changes`.
        """
        task = asyncio.create_task(change)
        self._asked.add(task)
        task.add_done_callback(self._asked.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise ServerExiting from None
            raise

    def give_up_changes(self) -> None:
        """Those that clients asked for, because the server ends."""
        for task in self._asked:
            task.cancel()

    def load_one_at_a_time(self) -> None:
        """Until `load_side_by_side`; nothing loads yet."""
        self._slots = asyncio.Semaphore(1)

    def load_side_by_side(self) -> None:
        for _ in range(1, self._width):
            self._slots.release()

    async def load(
        self, source: ModelSource, on_progress: OnProgress = ignore_progress, release: Callable[[], None] = lambda: None
    ) -> float:
        """Serve the versions of `source`, and no others of its model; those that are served as they are, go on.
        `release` is called once when what was loaded has gone, or if nothing was. Returns the seconds that it took from
        its turn on.

        Raises:
            LoadFailure: a version did not load; everything is as before.
        """
        entry, shared = self._registry.entry(source.name), SharedRelease(release)
        if fills_granted_memory(source.backend):
            self._ungranted.add(source.name)
        try:
            async with entry.changing:
                await asyncio.sleep(0)  # those that were asked for together divide the memory
                async with self._slots:
                    started = time.monotonic()
                    await self._load(entry, source, on_progress, shared)
                    return time.monotonic() - started
        finally:
            self._ungranted.discard(source.name)
            shared.leave()

    async def _load(
        self, entry: ModelEntry, source: ModelSource, on_progress: OnProgress, shared: SharedRelease
    ) -> None:
        entry.wanted = True
        new = {}
        try:
            for version in source.versions:
                kept = _find_unchanged(entry, version)
                new[version.number] = kept or await self._start(entry, source, version, on_progress, shared)
        except BaseException:
            await self._abandon([each for number, each in new.items() if _find_loaded(entry, number) is not each])
            raise
        for serving in entry.publish(new.items()):
            self._retire(entry, serving)
        _log_ignored_fields(source, self._builder.cache is not None, [each.config.document for each in new.values()])

    async def serve(self, name: str, number: str, build: Callable[[], Model]) -> None:
        """Load and serve a model that is made by hand. Raises `LoadFailure`."""
        entry = self._registry.entry(name)
        serving = await self._attempt(entry, number, lambda: _factory_of(build))
        entry.publish([(number, serving)])

    async def unload(self, name: str) -> None:
        """Serve a model no more; return when it takes no requests."""
        entry = self._registry.entries.get(name)
        if entry is None:
            return
        async with entry.changing:
            entry.wanted = False
            for serving in entry.publish(()):
                self._retire(entry, serving)

    async def close(self) -> None:
        """Unload everything at once, drained or not, whatever one of the models says."""
        self.hurry()
        self.give_up_changes()
        await asyncio.gather(*self._asked, return_exceptions=True)
        for entry in self._registry.entries.values():
            for serving in entry.publish(()):
                self._retire(entry, serving)
        while self._leaving:
            await asyncio.gather(*self._leaving)
        self._thread.shutdown(wait=False)

    def hurry(self) -> None:
        """Wait no more for what was replaced or unloaded."""
        self._hurry.set()

    async def _start(
        self,
        entry: ModelEntry,
        source: ModelSource,
        version: VersionSource,
        on_progress: OnProgress,
        shared: SharedRelease,
    ) -> LoadedModel:
        async def recipe() -> ModelFactory:
            return await self._where_room_is(source, version)

        serving = await self._attempt(entry, version.number, recipe, on_progress, source.file)
        serving.mark, serving.release = version.mark, release_both(serving.release, shared.take())
        return serving

    async def _where_room_is(self, source: ModelSource, version: VersionSource) -> ModelFactory:
        """Those that are leaving still hold what they will give back, and those that load what they were granted."""
        while True:
            async with self._granting:
                others = {*self._leaving, *self._under_way}
                sharers = max(1, min(len(self._ungranted), self._width - len(self._under_way)))
                try:
                    recipe = await self.aside(self._builder.recipe, source, version, sharers)
                    self._ungranted.discard(source.name)
                    return recipe
                except InsufficientMemory as error:
                    refusal = error
            if not await _wait_for_one(others, None if self._under_way else _UNLOAD_WAIT):
                raise refusal

    async def _attempt(
        self,
        entry: ModelEntry,
        number: str,
        recipe: Callable[[], Awaitable[ModelFactory]],
        on_progress: OnProgress = ignore_progress,
        file: Path | None = None,
    ) -> LoadedModel:
        started = time.monotonic()
        if _find_loaded(entry, number) is None:
            entry.version(number).state, entry.version(number).reason = ModelState.LOADING, ""
        try:
            made = await recipe()
            model = await self._loaded(made, on_progress)
        except CharoniaError as error:
            told = with_config_position(error, file)
            entry.fail(told.message, [number])
            raise LoadFailure(number, told) from error
        except Exception as error:
            entry.fail(str(error), [number])
            log.exception("model '%s' failed to load", entry.name)
            raise LoadFailure(number, error) from error
        tally = InFlightCounter(self._registry.tally)
        took = time.monotonic() - started
        return LoadedModel(model, made.describe(model.config), tally, took, release=made.release)

    async def _loaded(self, recipe: ModelFactory, on_progress: OnProgress) -> Model:
        with self._loading():
            try:
                model = await self.aside(recipe.make, on_progress)
                await model.load()
                recipe.loaded(model)
            except BaseException:
                recipe.release()
                raise
        return model

    @contextmanager
    def _loading(self) -> Iterator[None]:
        """What it was granted, nobody else has meanwhile."""
        under_way = asyncio.get_running_loop().create_future()
        self._under_way.add(under_way)
        try:
            yield
        finally:
            self._under_way.discard(under_way)
            under_way.set_result(None)

    async def _abandon(self, loaded: Sequence[LoadedModel]) -> None:
        """They were loaded in vain."""
        await asyncio.gather(*(_unload(serving) for serving in loaded))

    def _retire(self, entry: ModelEntry, serving: LoadedModel) -> None:
        """Unload it when its last request is done."""
        version = entry.version(serving.config.version)
        if version.serving is None:
            version.state = ModelState.UNLOADING
        task = asyncio.create_task(self._leave(version, serving), name=f"unload {entry.name}")
        self._leaving.add(task)
        task.add_done_callback(self._leaving.discard)

    async def _leave(self, version: ModelVersion, serving: LoadedModel) -> None:
        await self._be_superseded(version)
        await self._unless_hurried(serving.tally.drained())
        await _unload(serving)
        if version.state == ModelState.UNLOADING:
            version.state = ModelState.UNAVAILABLE
        await self._unless_hurried(self.aside(return_freed_memory))  # a load that hangs has the thread

    async def _be_superseded(self, version: ModelVersion) -> None:
        """A door may have looked it up, and still be reading the request."""
        if version.superseded is not None:
            await self._unless_hurried(asyncio.sleep(self._grace))
            version.superseded = None

    async def _unless_hurried(self, wait: Coroutine[None, None, None]) -> None:
        waits = [asyncio.ensure_future(each) for each in (wait, self._hurry.wait())]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for each in waits:
                each.cancel()


async def _wait_for_one(others: set[asyncio.Future[None]], patience: float | None) -> bool:
    if not others:
        return False
    done, _ = await asyncio.wait(others, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)


async def _factory_of(build: Callable[[], Model]) -> ModelFactory:
    model = build()
    return ModelFactory(lambda _: model, lambda config: config)


async def _unload(serving: LoadedModel) -> None:
    try:
        await serving.model.unload()
    except Exception:
        log.exception("model '%s' did not unload", serving.config.name)
    serving.release()


def _find_loaded(entry: ModelEntry, number: str) -> LoadedModel | None:
    version = entry.versions.get(number)
    return None if version is None else version.serving


def _find_unchanged(entry: ModelEntry, version: VersionSource) -> LoadedModel | None:
    serving = _find_loaded(entry, version.number)
    return serving if serving is not None and version.mark is not None and serving.mark == version.mark else None


def _log_ignored_fields(source: ModelSource, caching: bool, made: Sequence[ConfigDocument]) -> None:
    for folder in () if source.directory is None else find_misnamed_versions(source.directory):
        log.warning("model '%s': folder '%s' is no version, for it begins with 0", source.name, folder)
    for path in ignored_fields(source.config, caching, made):
        log.warning("%smodel '%s': %s", source.where(path), source.name, ignored_field_message(path))
