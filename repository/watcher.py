"""Loads the models of the repositories: at startup, and in mode poll whenever their files change.

All sources are read first; then models load side by side, as `lifecycle.py` describes.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol

from ..core.backends import OnProgress, ignore_progress
from ..core.errors import AlreadyExists, CharoniaError, Internal, InvalidArgument, Unavailable
from ..routing.route import Route
from .catalog import RepositoryCatalog
from .lifecycle import LoadFailure, ModelLifecycle
from .model_registry import ModelRegistry
from .model_source import ModelSource, in_order_of_need
from .on_demand import OnDemandLoader
from .route_control import RouteControl

log = logging.getLogger(__name__)

_READ_SECONDS = 30.0
"""How long the files of one model may keep the others waiting."""

_MOST_LOOKS = 16
"""The most looks at a repository from one attempt to load a model that fails to the next."""


class LoadListener(Protocol):
    """Is told of models that load: the display of a terminal, or the log."""

    def on_loading(self, name: str) -> OnProgress: ...

    def on_loaded(self, name: str, seconds: float) -> None: ...

    def on_described(self, name: str) -> None: ...

    def on_failed(self, name: str, reason: str) -> None: ...


class LoadLogger:
    """A `LoadListener` that writes to the log."""

    def on_loading(self, name: str) -> OnProgress:
        return ignore_progress

    def on_loaded(self, name: str, seconds: float) -> None:
        log.info("model '%s' is ready after %.2f s", name, seconds)

    def on_described(self, name: str) -> None:
        log.info("model '%s' is loaded by its first request", name)

    def on_failed(self, name: str, reason: str) -> None:
        log.error("model '%s' failed to load: %s", name, reason)


class ReadSource(NamedTuple):
    """A model's source, and what releases the directory that it was downloaded to."""

    source: ModelSource
    release: Callable[[], None]


@dataclass
class LoadAttempt:
    """The last attempt to load a model."""

    mark: Hashable
    """What it was made from, or why that cannot be read: another one is a change. None for a model to read again."""

    failures: int = 0
    """Attempts that failed one after the other, with this mark."""

    looks_left: int = 0
    """Looks at the repository that pass before the next attempt, if this one failed."""

    reason: str = ""
    """Why it failed."""

    def record_failure(self) -> None:
        """Let twice as many looks pass as before this failure."""
        self.looks_left = min(2**self.failures, _MOST_LOOKS) - 1
        self.failures += 1


class RepositoryWatcher:
    """Keeps the registry in step with the catalog. Remembers the last attempt to load each model. With `on_demand` it
    loads those alone that are in memory or pinned; requests load the others. It waits for no model whose files hang,
    or, but for a `patient` start, whose load does, and looks at it again when that has ended.

    What failed is tried again, at the next look and then ever less often, at once when a model that it asks loads."""

    def __init__(
        self,
        catalog: RepositoryCatalog,
        registry: ModelRegistry,
        lifecycle: ModelLifecycle,
        routes: RouteControl | None = None,
        on_demand: OnDemandLoader | None = None,
    ) -> None:
        self._catalog = catalog
        self._registry = registry
        self._lifecycle = lifecycle
        self._attempts: dict[str, LoadAttempt] = {}
        self._stalled: dict[str, asyncio.Task[float]] = {}
        self._unread: dict[str, asyncio.Task[ReadSource]] = {}
        self._routes, self._on_demand = routes, on_demand
        self._route_error = ""
        self.patient = False
        """Whether `load_initial` waits for loads without progress, too."""

    async def load_initial(self, names: Sequence[str], listener: LoadListener, in_memory: Collection[str] = ()) -> bool:
        """Load the models of these names, or where requests load models those `in_memory`; returns whether all of them
        did. A failure leaves the others alone."""
        for name in names:
            self._registry.get_or_add(name).awaited = True
        self._registry.starting = True
        try:
            return await self._load(names, listener, in_memory)
        finally:
            self._registry.starting = False

    async def poll(self, every: float) -> None:
        """Poll for changes every so many seconds, forever."""
        while True:
            await asyncio.sleep(every)
            await self.poll_once(LoadLogger())

    async def poll_once(self, listener: LoadListener) -> None:
        """Load models that are new or changed, unload those that are gone; nothing while a repository cannot be read:
        it may be back the next time."""
        if not await self._lifecycle.refresh(self._catalog):
            return
        names = await self._lifecycle.run_blocking(self._catalog.model_names)
        routes = await self._read_routes()
        if self._routes is None or routes is None:
            await self._load(names, listener)
        else:
            with self._routes.versions.coming(routes.values()):  # what they name is loaded before they are served
                await self._load(names, listener)
                await self._follow_routes(self._routes, routes)
        for name in set(self._attempts) - set(names):
            del self._attempts[name]
            await self._lifecycle.unload(name)

    async def _load(self, names: Iterable[str], listener: LoadListener, in_memory: Collection[str] = ()) -> bool:
        """Returns whether all of them loaded, or were tried before as they are."""
        sources, readable = dict[str, ReadSource](), True
        wanted = [name for name in names if name not in self._stalled and name not in self._unread]
        reading = {name: asyncio.create_task(self._read(name, listener)) for name in wanted}
        try:
            for name in wanted:
                try:
                    read = await self._read_in_time(name, reading.pop(name, None), listener)
                except CharoniaError as error:
                    if self._is_due(name, error.message):
                        readable = False
                        self._attempts[name] = LoadAttempt(error.message)
                        await self._record_unreadable(name, error)
                        listener.on_failed(name, error.message)
                else:
                    source = read.source
                    steps = await self._lifecycle.run_blocking(self._catalog.steps_there, source)
                    asked = sorted(steps.difference(wanted, self._registry.entries))
                    self._registry.implicit.update(asked)
                    wanted += asked
                    sources[name] = read
        finally:
            for task in reading.values():
                task.cancel()
        loads: dict[str, asyncio.Task[bool]] = {}
        async with asyncio.TaskGroup() as group:
            for source in in_order_of_need(read.source for read in sources.values()):
                name = source.name
                needed = [loads[step] for step in source.steps if step in loads]
                if not self._is_due(name, source.versions) and not (needed and self._attempts[name].failures):
                    sources[name].release()
                    continue
                if name not in self._attempts or self._attempts[name].mark != source.versions:
                    self._attempts[name] = LoadAttempt(source.versions)
                load = self._describe_one if self._waits(source, in_memory) else self._load_one
                loads[name] = group.create_task(load(sources[name], needed, listener))
        return readable and all(load.result() for load in loads.values())

    async def _read_in_time(
        self, name: str, reading: "asyncio.Task[ReadSource] | None", listener: LoadListener
    ) -> ReadSource:
        """The source of a model. Raises `Unavailable` where reading it takes long, as a directory of a network may; it
        goes on, and until it has ended the model is not looked at."""
        reading = reading or asyncio.create_task(self._read(name, listener))
        try:
            await asyncio.wait({reading}, timeout=None if self._catalog.has_buckets else _READ_SECONDS)
        except asyncio.CancelledError:
            reading.cancel()
            raise
        if reading.done():
            return reading.result()
        self._unread[name] = reading
        reading.add_done_callback(partial(self._end_reading, name))
        raise Unavailable(f"model '{name}': its files cannot be read: nothing came of them for {_READ_SECONDS:g} s")

    def _end_reading(self, name: str, reading: "asyncio.Task[ReadSource]") -> None:
        del self._unread[name]
        self._attempts[name] = LoadAttempt(None)
        if not reading.cancelled() and reading.exception() is None:
            reading.result().release()

    async def _read_routes(self) -> dict[str, Route] | None:
        """What the files of routes say; None if one cannot be read, or nobody asks."""
        try:
            return None if self._routes is None else await self._lifecycle.read_routes(self._catalog)
        except CharoniaError as error:
            self._keep_routes(error)
            return None

    async def _follow_routes(self, routes: RouteControl, files: Mapping[str, Route]) -> None:
        try:
            await routes.follow_files(files)
            self._route_error = ""
        except (InvalidArgument, Internal) as error:
            self._keep_routes(error)

    def _keep_routes(self, error: CharoniaError) -> None:
        if error.message != self._route_error:
            log.error("the routes stay as they are: %s", error.message)
        self._route_error = error.message

    async def _read(self, name: str, listener: LoadListener) -> ReadSource:
        def on_progress(phase: str, fraction: float, seconds: float, detail: str) -> None:
            listener.on_loading(name)(phase, fraction, seconds, detail)

        return ReadSource(*await self._lifecycle.read(self._catalog, name, on_progress=on_progress))

    async def _record_unreadable(self, name: str, error: CharoniaError) -> None:
        entry = self._registry.get_or_add(name)
        if isinstance(error, AlreadyExists):
            # It is unknown which of them is wanted. As in tritonserver, the others that serve keep the server ready.
            await self._lifecycle.unload(name)
        entry.record_load_failure(error.message, () if entry.loaded_versions else entry.versions)

    async def _load_one(self, read: ReadSource, needed: Sequence[asyncio.Task[bool]], listener: LoadListener) -> bool:
        """Load one model; an ensemble when the loads of the models that it needs have ended."""
        source = read.source
        if needed:
            await asyncio.wait(needed)
        stalled = asyncio.Event()
        on_stall = (lambda: None) if self.patient and self._registry.starting else stalled.set
        progress = listener.on_loading(source.name)
        load = asyncio.create_task(self._lifecycle.load(source, progress, read.release, on_stall))
        await _wait_until_done_or(stalled, load)
        if load.done():
            return self._end_attempt(source.name, listener, load)
        self._stalled[source.name] = load
        self._lifecycle.cancel_at_exit(load)
        load.add_done_callback(partial(self._end_stalled, source.name, listener))
        return False

    def _end_stalled(self, name: str, listener: LoadListener, load: "asyncio.Task[float]") -> None:
        del self._stalled[name]
        if not load.cancelled() and self._end_attempt(name, listener, load):
            for attempt in self._attempts.values():  # some of which may have needed it
                attempt.looks_left = 0

    def _end_attempt(self, name: str, listener: LoadListener, load: "asyncio.Task[float]") -> bool:
        """Note how an attempt ended, and tell it; whether the model loaded."""
        try:
            seconds = load.result()
        except LoadFailure as failure:
            error = failure.cause
            reason = error.message if isinstance(error, CharoniaError) else f"{type(error).__name__}: {error}"
            self._record_failure(name, reason, listener)
            return False
        self._record_success(name)
        listener.on_loaded(name, seconds)
        return True

    def _record_success(self, name: str) -> None:
        attempt = self._attempts.setdefault(name, LoadAttempt(None))
        attempt.failures, attempt.reason = 0, ""

    def _record_failure(self, name: str, reason: str, listener: LoadListener) -> None:
        """Note that a model failed to load; the same failure of the same files is told once."""
        attempt = self._attempts.setdefault(name, LoadAttempt(None))
        attempt.record_failure()
        if attempt.reason != reason:
            listener.on_failed(name, reason)
        attempt.reason = reason

    def _waits(self, source: ModelSource, in_memory: Collection[str]) -> bool:
        """Whether the model is to be loaded by a request."""
        entry = self._registry.entries.get(source.name)
        resident = source.pinned or source.name in in_memory or (entry is not None and bool(entry.loaded_versions))
        return self._on_demand is not None and not resident

    async def _describe_one(self, read: ReadSource, _: Sequence[asyncio.Task[bool]], listener: LoadListener) -> bool:
        assert self._on_demand is not None
        name = read.source.name
        try:
            await self._lifecycle.describe(*read)
        except LoadFailure as failure:
            self._record_failure(name, str(failure.cause), listener)
            return False
        self._record_success(name)
        self._on_demand.forget_failure(name)
        listener.on_described(name)
        return True

    def _is_due(self, name: str, mark: Hashable) -> bool:
        """Whether a model is to be loaded at this look: new, changed, or failed and enough looks have passed."""
        last = self._attempts.get(name)
        if last is None or last.mark != mark:
            return True
        last.looks_left -= 1
        return last.failures > 0 and last.looks_left < 0


async def _wait_until_done_or(event: asyncio.Event, task: "asyncio.Task[float]") -> None:
    """Return when the task has ended, or the event is set; the task is cancelled if this is."""
    happens = asyncio.create_task(event.wait())
    try:
        await asyncio.wait({task, happens}, return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        raise
    finally:
        happens.cancel()
