"""Loading and unloading of models: a new version serves before the old one goes, and the old one until it is drained.

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

from ..core.cancellation import wait_for_first
from ..core.errors import CharoniaError, ServerExiting
from ..core.gateway import ModelState
from ..core.model import Model, RawConfig
from ..processes import gc_tuning
from ..processes.host import release_free_memory, usable_cores
from ..telemetry.gpus import usable_gpus
from .backend_registry import FILLS_GRANTED_MEMORY, OnProgress
from .builder import ModelBuilder, ModelFactory
from .memory_budget import InsufficientMemory
from .model_entry import LoadedModel, ModelEntry, ModelVersion
from .model_registry import ModelRegistry
from .model_source import ModelSource, VersionSource, find_misnamed_versions, with_config_position
from .unsupported_fields import ignored_field_message, ignored_fields

log = logging.getLogger(__name__)

T = TypeVar("T")

_MAX_CONCURRENT_LOADS = 4
"""Models that load at once at most: each divides the memory more."""

_UNLOAD_WAIT = 10.0
"""Seconds for which what does not fit waits for the next of those that are leaving to be gone."""


def ignore_progress(phase: str, fraction: float, seconds: float, detail: str) -> None:
    """An `OnProgress` that does nothing."""


class SharedRelease:
    """The release of a source that several versions are made from: called once, when the last of them is unloaded."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._holders = 1  # the load itself

    def add_holder(self) -> Callable[[], None]:
        self._holders += 1
        return self.drop_holder

    def drop_holder(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._release()


def release_both(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
    """One function that calls both."""

    def release() -> None:
        first()
        second()

    return release


def return_freed_memory() -> None:
    """Collect the cycles that a model left behind, and return its memory to the system."""
    gc_tuning.collect_and_freeze()
    release_free_memory()


class LoadFailure(Exception):
    """One version of a model did not load, because of `cause`."""

    def __init__(self, version: str, cause: Exception) -> None:
        super().__init__(str(cause))
        self.version = version
        self.cause = cause


class ModelLifecycle:
    """Loads models into a registry, and takes them out of it."""

    def __init__(self, registry: ModelRegistry, builder: ModelBuilder) -> None:
        self._registry = registry
        self._builder = builder
        self._max_concurrent = 1 if usable_gpus() else min(_MAX_CONCURRENT_LOADS, usable_cores().logical)
        self._slots = asyncio.Semaphore(self._max_concurrent)
        self._loads_in_progress: set[asyncio.Future[None]] = set()
        self._awaiting_grant: set[str] = set()
        self._grant_lock = asyncio.Lock()
        self._client_changes: set[asyncio.Task[None]] = set()
        self._unloads: set[asyncio.Task[None]] = set()
        self._drain_stopped = asyncio.Event()
        # One thread for all that blocks: each that ever ran keeps some memory of what it did.
        self._thread = ThreadPoolExecutor(1, "loading")

    async def run_blocking(self, work: Callable[..., T], *arguments: object) -> T:
        """Run a blocking function outside the event loop, one at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work, *arguments)

    async def run_to_completion(self, change: Coroutine[None, None, None]) -> None:
        """Load or unload for a client: to the end, even if the client leaves meanwhile.

        Raises:
            Exiting: it was given up; see `give_up_changes`.
        """
        task = asyncio.create_task(change)
        self._client_changes.add(task)
        task.add_done_callback(self._client_changes.discard)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise ServerExiting from None
            raise

    def cancel_client_changes(self) -> None:
        """Cancel the loads and unloads that clients wait for: the server exits."""
        for task in self._client_changes:
            task.cancel()

    def load_sequentially(self) -> None:
        """Until `load_side_by_side`; nothing loads yet."""
        self._slots = asyncio.Semaphore(1)

    def load_concurrently(self) -> None:
        for _ in range(1, self._max_concurrent):
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
        entry, shared = self._registry.get_or_add(source.name), SharedRelease(release)
        if source.backend in FILLS_GRANTED_MEMORY:
            self._awaiting_grant.add(source.name)
        try:
            async with entry.change_lock:
                await asyncio.sleep(0)  # those that were asked for together divide the memory
                async with self._slots:
                    started = time.monotonic()
                    await self._load(entry, source, on_progress, shared)
                    return time.monotonic() - started
        finally:
            self._awaiting_grant.discard(source.name)
            shared.drop_holder()

    async def _load(
        self, entry: ModelEntry, source: ModelSource, on_progress: OnProgress, shared: SharedRelease
    ) -> None:
        entry.should_serve = True
        new = {}
        try:
            for version in source.versions:
                kept = _find_unchanged(entry, version)
                new[version.number] = kept or await self._load_version(entry, source, version, on_progress, shared)
        except BaseException:
            await self._unload_unpublished(
                [each for number, each in new.items() if _find_loaded(entry, number) is not each]
            )
            raise
        for serving in entry.publish(new.items()):
            self._retire(entry, serving)
        _log_ignored_fields(source, self._builder.cache is not None, [each.config.raw for each in new.values()])

    async def serve_built_model(self, name: str, number: str, build: Callable[[], Model]) -> None:
        """Load and serve a model that is made by hand. Raises `LoadFailure`."""
        entry = self._registry.get_or_add(name)
        serving = await self._load_or_record_failure(entry, number, lambda: _factory_of(build))
        entry.publish([(number, serving)])

    async def unload(self, name: str) -> None:
        """Stop serving a model; return when it takes no new requests."""
        entry = self._registry.entries.get(name)
        if entry is None:
            return
        async with entry.change_lock:
            entry.should_serve = False
            for serving in entry.publish(()):
                self._retire(entry, serving)

    async def close(self) -> None:
        """Unload everything at once, drained or not, whatever one of the models says."""
        self.stop_draining()
        self.cancel_client_changes()
        await asyncio.gather(*self._client_changes, return_exceptions=True)
        for entry in self._registry.entries.values():
            for serving in entry.publish(()):
                self._retire(entry, serving)
        while self._unloads:
            await asyncio.gather(*self._unloads)
        self._thread.shutdown(wait=False)

    def stop_draining(self) -> None:
        """Unload what is draining without waiting any longer."""
        self._drain_stopped.set()

    async def _load_version(
        self,
        entry: ModelEntry,
        source: ModelSource,
        version: VersionSource,
        on_progress: OnProgress,
        shared: SharedRelease,
    ) -> LoadedModel:
        async def recipe() -> ModelFactory:
            return await self._prepare_when_memory_allows(source, version)

        serving = await self._load_or_record_failure(entry, version.number, recipe, on_progress, source.config_file)
        serving.source_mark, serving.release = version.mark, release_both(serving.release, shared.add_holder())
        return serving

    async def _prepare_when_memory_allows(self, source: ModelSource, version: VersionSource) -> ModelFactory:
        """Those that are leaving still hold what they will give back, and those that load what they were granted."""
        while True:
            async with self._grant_lock:
                others = {*self._unloads, *self._loads_in_progress}
                sharers = max(1, min(len(self._awaiting_grant), self._max_concurrent - len(self._loads_in_progress)))
                try:
                    recipe = await self.run_blocking(self._builder.prepare, source, version, sharers)
                    self._awaiting_grant.discard(source.name)
                    return recipe
                except InsufficientMemory as error:
                    refusal = error
            if not await _wait_for_one(others, None if self._loads_in_progress else _UNLOAD_WAIT):
                raise refusal

    async def _load_or_record_failure(
        self,
        entry: ModelEntry,
        number: str,
        recipe: Callable[[], Awaitable[ModelFactory]],
        on_progress: OnProgress = ignore_progress,
        file: Path | None = None,
    ) -> LoadedModel:
        started = time.monotonic()
        if _find_loaded(entry, number) is None:
            entry.get_or_add_version(number).state, entry.get_or_add_version(number).reason = ModelState.LOADING, ""
        try:
            made = await recipe()
            model = await self._build_and_load(made, on_progress)
        except CharoniaError as error:
            told = with_config_position(error, file)
            entry.record_load_failure(told.message, [number])
            raise LoadFailure(number, told) from error
        except Exception as error:
            entry.record_load_failure(str(error), [number])
            log.exception("model '%s' failed to load", entry.name)
            raise LoadFailure(number, error) from error
        took = time.monotonic() - started
        return LoadedModel(model, made.describe(model.config), load_seconds=took, release=made.release)

    async def _build_and_load(self, recipe: ModelFactory, on_progress: OnProgress) -> Model:
        with self._load_in_progress():
            try:
                model = await self.run_blocking(recipe.make, on_progress)
                await model.load()
                recipe.on_loaded(model)
            except BaseException:
                recipe.release()
                raise
        return model

    @contextmanager
    def _load_in_progress(self) -> Iterator[None]:
        """What it was granted, nobody else has meanwhile."""
        under_way = asyncio.get_running_loop().create_future()
        self._loads_in_progress.add(under_way)
        try:
            yield
        finally:
            self._loads_in_progress.discard(under_way)
            under_way.set_result(None)

    async def _unload_unpublished(self, loaded: Sequence[LoadedModel]) -> None:
        """Unload versions that were loaded and will not be published."""
        await asyncio.gather(*(_unload(serving) for serving in loaded))

    def _retire(self, entry: ModelEntry, serving: LoadedModel) -> None:
        """Unload a model when its last request is done."""
        version = entry.get_or_add_version(serving.config.version)
        if version.loaded is None:
            version.state = ModelState.UNLOADING
        task = asyncio.create_task(self._drain_and_unload(version, serving), name=f"unload {entry.name}")
        self._unloads.add(task)
        task.add_done_callback(self._unloads.discard)

    async def _drain_and_unload(self, version: ModelVersion, serving: LoadedModel) -> None:
        await self._until_drain_stopped(serving.in_flight.wait_drained())
        await _unload(serving)
        if version.state == ModelState.UNLOADING:
            version.state = ModelState.UNAVAILABLE
        await self._until_drain_stopped(self.run_blocking(return_freed_memory))  # a load that hangs has the thread

    async def _until_drain_stopped(self, wait: Coroutine[None, None, None]) -> None:
        await wait_for_first(wait, self._drain_stopped.wait())


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
    return None if version is None else version.loaded


def _find_unchanged(entry: ModelEntry, version: VersionSource) -> LoadedModel | None:
    serving = _find_loaded(entry, version.number)
    return serving if serving is not None and version.mark is not None and serving.source_mark == version.mark else None


def _log_ignored_fields(source: ModelSource, caching: bool, made: Sequence[RawConfig]) -> None:
    for folder in () if source.directory is None else find_misnamed_versions(source.directory):
        log.warning("model '%s': folder '%s' is no version, for it begins with 0", source.name, folder)
    for path in ignored_fields(source.config, caching, made):
        log.warning("%smodel '%s': %s", source.config_position(path), source.name, ignored_field_message(path))
