"""Loading and unloading of models: a new version serves before the old one goes, which finishes its requests first.

Models load side by side as far as cores and memory allow; one that does not fit waits until those that load have stated
their needs. On GPUs one loads at a time, and holds what its load made unavailable there.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Coroutine
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from ..core.backends import OnProgress, ignore_progress
from ..core.errors import CharoniaError, Internal, ServerExiting
from ..core.gateway import ModelState
from ..core.model import Model, RawConfig
from ..core.native_calls import CONTROL_FLOW, describe_panic
from ..core.tasks import wait_for_first
from ..processes import gc_tuning
from ..processes.host import release_free_memory, usable_cores
from ..routing.route import Route
from ..telemetry.host_metrics import usable_gpus
from ..telemetry.shared_state import ModelServices, ServerAdministration
from .backend_registry import is_text_backend
from .builder import ModelBuilder, ModelFactory, with_config_defaults
from .catalog import FetchedModel, RepositoryCatalog
from .ensemble_steps import follow_steps, refuse_circle, step_interfaces
from .load_turn import Turn
from .memory_budget import InsufficientMemory
from .model_registry import LoadedModel, ModelEntry, ModelRegistry, ModelVersion
from .model_source import ModelSource, VersionSource, with_config_position
from .own_changes import is_current, look_beside, take_own_changes

log = logging.getLogger(__name__)

T = TypeVar("T")

_PATIENCE = 10.0
"""Seconds for which blocking work keeps other work waiting: files may lie where nothing answers any more."""

_STALL_SECONDS = 60.0
"""Seconds without progress after which a load keeps no other from beginning."""

_MOST_THREADS = 64
_MAX_CONCURRENT_LOADS = 4
"""Each further model that loads at once leaves the others less memory."""

_UNLOAD_WAIT = 10.0
"""Seconds for which a model that does not fit waits for the next of those that are being unloaded."""


class SharedRelease:
    """The release of a source that several versions are made from: called once, when its last holder drops it."""

    def __init__(self, release: Callable[[], None]) -> None:
        self._release = release
        self._holders = 1  # the load itself

    def add_holder(self) -> None:
        self._holders += 1

    def drop_holder(self) -> None:
        self._holders -= 1
        if not self._holders:
            self._release()


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
    """Loads models into a registry, and takes them out of it. `make_room` begins to unload models for one that does not
    fit, and tells whether it did."""

    def __init__(self, registry: ModelRegistry, builder: ModelBuilder, gateway: ServerAdministration) -> None:
        self._registry = registry
        self._builder = builder
        self._gateway = gateway
        self._max_concurrent = 1 if usable_gpus() else min(_MAX_CONCURRENT_LOADS, usable_cores().logical)
        self._slots = asyncio.Semaphore(self._max_concurrent)
        self._loads_in_progress: set[asyncio.Future[None]] = set()
        self._awaiting_grant: set[str] = set()
        self._grant_lock = asyncio.Lock()
        self._client_changes: set[asyncio.Task[Any]] = set()
        self._unloads: set[asyncio.Task[None]] = set()
        self._drain_stopped = asyncio.Event()
        self.make_room: Callable[[InsufficientMemory, str], bool] = lambda missing, name: False
        # One thread at a time for all blocking work, as long as none hangs: each thread that ever ran keeps some of its
        # memory.
        self._threads = ThreadPoolExecutor(_MOST_THREADS, "loading")
        self._blocking = asyncio.Lock()

    async def run_blocking(self, work: Callable[..., T], *arguments: object) -> T:
        """Run a blocking function outside the event loop, one at a time; others do not wait for one that hangs."""
        async with Turn(self._blocking, _PATIENCE):
            return await asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)

    async def refresh(self, catalog: RepositoryCatalog) -> bool:
        """Whether every repository can be read at this moment."""
        return await (asyncio.to_thread if catalog.has_buckets else self.run_blocking)(catalog.refresh)

    async def read_routes(self, catalog: RepositoryCatalog) -> dict[str, Route]:
        """Raises as `RepositoryCatalog.read_routes` does."""
        return await (asyncio.to_thread if catalog.has_buckets else self.run_blocking)(catalog.read_routes)

    async def read(
        self,
        catalog: RepositoryCatalog,
        name: str,
        override: RawConfig | None = None,
        on_progress: OnProgress = ignore_progress,
    ) -> tuple[ModelSource, Callable[[], None]]:
        """The source of a model, downloaded if it has to be, and what releases it: see `load`. Several may be read at
        once. Raises as `RepositoryCatalog.fetch` and `read` do."""
        fetched = FetchedModel()
        if catalog.has_buckets:
            fetched = await asyncio.to_thread(catalog.fetch, name, on_progress, override)
        try:
            source = await self.run_blocking(catalog.read, name, override, fetched.directory, fetched.place)
        except BaseException:
            fetched.release()
            raise
        return source, fetched.release

    async def run_to_completion(self, change: Coroutine[None, None, T]) -> T:
        """Load or unload for a client: to the end, even if the client leaves meanwhile. Raises `ServerExiting` after
        `cancel_client_changes`."""
        task = asyncio.create_task(change)
        self.cancel_at_exit(task)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():
                raise ServerExiting from None
            raise

    def cancel_at_exit(self, change: asyncio.Task[Any]) -> None:
        """A change that nobody may wait for any more ends with `cancel_client_changes`."""
        self._client_changes.add(change)
        change.add_done_callback(self._client_changes.discard)

    def cancel_client_changes(self) -> None:
        """Cancel the loads and unloads that clients wait for: the server exits."""
        for task in self._client_changes:
            task.cancel()

    def load_sequentially(self) -> None:
        """Load one model at a time until `load_concurrently`; called before anything loads."""
        self._slots = asyncio.Semaphore(1)

    def load_concurrently(self) -> None:
        for _ in range(1, self._max_concurrent):
            self._slots.release()

    async def load(
        self,
        source: ModelSource,
        on_progress: OnProgress = ignore_progress,
        release: Callable[[], None] = lambda: None,
        on_stall: Callable[[], None] = lambda: None,
    ) -> float:
        """Serve the versions of `source`, and no others of its model; those served unchanged stay. Returns the seconds
        of the load without its wait.

        `release` is called once, when all that was loaded has been unloaded, or nothing was; `on_stall` when there was
        no progress for long: others begin beside the load. Raises `LoadFailure`: everything is as before.
        """
        entry, shared = self._registry.get_or_add(source.name), SharedRelease(release)
        self._registry.aliases.update(dict.fromkeys(source.aliases, source.name))
        if is_text_backend(source.backend):
            self._awaiting_grant.add(source.name)
        try:
            async with entry.change_lock:
                await asyncio.sleep(0)  # models whose loads begin together divide the memory
                async with Turn(self._slots, _STALL_SECONDS, partial(_note_stall, source.name, on_stall)) as turn:

                    def renew(phase: str, fraction: float, seconds: float, detail: str) -> None:
                        turn.renew()
                        on_progress(phase, fraction, seconds, detail)

                    started = time.monotonic()
                    await self._load(entry, source, renew, shared)
                    seconds = time.monotonic() - started
            await follow_steps(self._registry, source.name, self._gateway)
            return seconds
        finally:
            self._awaiting_grant.discard(source.name)
            shared.drop_holder()

    async def _load(
        self, entry: ModelEntry, source: ModelSource, on_progress: OnProgress, shared: SharedRelease
    ) -> None:
        entry.pinned, entry.reason = source.pinned, ""
        served, new = entry.loaded_versions, {}
        try:
            for version in source.versions:
                loaded = served.get(version.number)
                if loaded is None or not is_current(source.name, loaded, version):
                    loaded = await self._load_version(entry, source, version, on_progress)
                    shared.add_holder()
                    loaded.resources.callback(shared.drop_holder)
                new[version.number] = loaded
        except BaseException:
            await asyncio.gather(*[_unload(model) for number, model in new.items() if served.get(number) is not model])
            raise
        entry.routed = source.routed
        for old in entry.publish(new):
            self._retire(entry, old)
        marks = [version.mark for version in source.versions if new[version.number] is not served.get(version.number)]
        if marks:
            take_own_changes(entry, marks[0], await self.run_blocking(look_beside, source))
        raw = [model.config.raw for model in new.values()]
        await self.run_blocking(self._builder.log_ignored_fields, source, raw)

    async def _load_version(
        self, entry: ModelEntry, source: ModelSource, version: VersionSource, on_progress: OnProgress
    ) -> LoadedModel:
        """Load one version. Raises `LoadFailure`, which the entry has recorded."""
        started, known = time.monotonic(), entry.get_or_add_version(version.number)
        if known.loaded is None:
            known.state = ModelState.LOADING
            known.reason = ""
            known.failure = ""
        try:
            refuse_circle(self._registry, source.name, source.config)
            steps = step_interfaces(source.config, self._gateway)
            factory = await self._prepare_when_memory_allows(source, version)
            model = await self._build_and_load(factory, on_progress)
        except CONTROL_FLOW:
            raise
        except BaseException as error:
            cause = error if isinstance(error, Exception) else Internal(describe_panic(error))
            if isinstance(error, CharoniaError):
                cause = await self.run_blocking(with_config_position, error, source.config_file)
            else:
                log.exception("model '%s' failed to load", entry.name)
            entry.record_load_failure(str(cause), [version.number])
            raise LoadFailure(version.number, cause) from error
        config = replace(with_config_defaults(model.config, source.config), aliases=source.aliases)
        loaded = LoadedModel(model, config, time.monotonic() - started, version.mark, steps=steps)
        loaded.resources.callback(factory.reservation.release)
        return loaded

    async def _prepare_when_memory_allows(self, source: ModelSource, version: VersionSource) -> ModelFactory:
        """Prepare a version once its memory is free: those that are unloaded will give theirs back, and those that load
        what they were granted and do not need."""
        while True:
            async with Turn(self._grant_lock, _PATIENCE):
                others = {*self._unloads, *self._loads_in_progress}
                sharers = max(1, min(len(self._awaiting_grant), self._max_concurrent - len(self._loads_in_progress)))
                try:
                    factory = await self._run_for_version(self._builder.prepare, source, version, sharers)
                    self._awaiting_grant.discard(source.name)
                    return factory
                except InsufficientMemory as error:
                    if not others and self.make_room(error, source.name):
                        others = {*self._unloads}
                    if not others:
                        raise
                    refusal = error
            timeout = None if self._loads_in_progress else _UNLOAD_WAIT
            done, _ = await asyncio.wait(others, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                raise refusal

    async def _run_for_version(
        self, work: Callable[..., T], source: ModelSource, version: VersionSource, *arguments: object
    ) -> T:
        """Run a blocking function of the builder. The model's own code may take long there: it ends if this is
        cancelled."""
        services = ModelServices(self._gateway, asyncio.get_running_loop())
        try:
            return await self.run_blocking(work, source, version, services, *arguments)
        except asyncio.CancelledError:
            services.interruption.request()
            raise

    async def _build_and_load(self, factory: ModelFactory, on_progress: OnProgress) -> Model:
        loading = asyncio.get_running_loop().create_future()
        self._loads_in_progress.add(loading)
        try:
            model = await self.run_blocking(factory.build, on_progress)
            await model.load()
            factory.reservation.finish_loading(model.capabilities.memory)
            return model
        except BaseException:
            factory.reservation.release()
            raise
        finally:
            self._loads_in_progress.discard(loading)
            loading.set_result(None)

    async def describe(self, source: ModelSource, release: Callable[[], None]) -> None:
        """Serve the versions of `source` as soon as they are asked for: their configs are read, and nothing is loaded.
        Raises `LoadFailure` for a version that cannot be read; everything is as before."""
        entry = self._registry.get_or_add(source.name)
        self._registry.aliases.update(dict.fromkeys(source.aliases, source.name))
        try:
            async with entry.change_lock:
                configs = {}
                for version in source.versions:
                    try:
                        described = await self._run_for_version(self._builder.describe, source, version)
                        configs[version.number] = described
                    except CharoniaError as error:
                        entry.record_load_failure(error.message, [version.number])
                        raise LoadFailure(version.number, error) from error
                entry.pinned, entry.routed = False, source.routed
                for old in entry.publish({}):
                    self._retire(entry, old)
                entry.describe(configs)
            await follow_steps(self._registry, source.name, self._gateway)
        finally:
            release()

    def evict(self, entry: ModelEntry) -> None:
        """Take a model out of memory until it is asked for again. It must not be changing."""
        for old in entry.evict():
            self._retire(entry, old)

    async def unload(self, name: str) -> None:
        """Stop serving a model; return when it takes no new requests."""
        entry = self._registry.entries.get(name)
        if entry is None:
            return
        async with entry.change_lock:
            for old in entry.publish({}):
                self._retire(entry, old)

    async def unload_versions(self, name: str, choose: Callable[[], Collection[str]]) -> None:
        """Stop serving those versions of a model that `choose` tells once nothing else changes it; return when they
        take no new requests."""
        entry = self._registry.entries[name]
        async with entry.change_lock:
            numbers = choose()
            for old in entry.drop(numbers) if numbers else ():
                self._retire(entry, old)
        await follow_steps(self._registry, name, self._gateway)

    def _retire(self, entry: ModelEntry, old: LoadedModel) -> None:
        """Unload a model when its last request is done."""
        version = entry.get_or_add_version(old.config.version)
        if version.loaded is None:
            version.state = ModelState.UNLOADING
        task = asyncio.create_task(self._drain_and_unload(version, old), name=f"unload {entry.name}")
        self._unloads.add(task)
        task.add_done_callback(self._unloads.discard)

    async def _drain_and_unload(self, version: ModelVersion, old: LoadedModel) -> None:
        await wait_for_first(old.in_flight.wait_drained(), self._drain_stopped.wait())
        await _unload(old)
        if version.state == ModelState.UNLOADING:
            version.state = ModelState.UNAVAILABLE
        if not self._drain_stopped.is_set():  # a process that ends returns all at once
            await wait_for_first(self.run_blocking(return_freed_memory), self._drain_stopped.wait())

    async def close(self) -> None:
        """Unload everything at once, drained or not, also if a model fails to unload."""
        self._drain_stopped.set()
        self.cancel_client_changes()
        await asyncio.gather(*self._client_changes, return_exceptions=True)
        for entry in self._registry.entries.values():
            for old in entry.publish({}):
                self._retire(entry, old)
        while self._unloads:
            await asyncio.gather(*self._unloads)
        self._threads.shutdown(wait=False)


def _note_stall(name: str, on_stall: Callable[[], None]) -> None:
    log.warning("model '%s': no progress in loading it for %g s; others load beside it", name, _STALL_SECONDS)
    on_stall()


async def _unload(loaded: LoadedModel) -> None:
    try:
        await loaded.model.unload()
    except Exception:
        log.exception("model '%s' did not unload", loaded.config.name)
    loaded.resources.close()
