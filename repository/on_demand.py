"""Models on demand: each is loaded by the first request for it, and unloaded when another one needs its memory.

Who asks waits for the load, one for all who ask. The models that make room are those that were idle longest: nobody
asks them, none of their sequences is open, and they have been in memory for a while.
"""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from ..core.errors import CharoniaError, NotReady, ServerExiting, Unavailable
from ..core.metrics import Measurement, Reading, TimeInState
from .catalog import RepositoryCatalog
from .lifecycle import LoadFailure, ModelLifecycle
from .memory_budget import InsufficientMemory
from .model_registry import LoadedModel, ModelEntry, ModelRegistry

log = logging.getLogger(__name__)

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 300.0
"""Seconds after which a model that failed to load is tried again; doubled at each failure."""

_SOON = 60.0
"""Seconds within which a model that made room must not be asked for again: else models take turns in memory."""

_SAY_AGAIN = 60.0

_BREATH = 2.0
"""Seconds that the model which was just loaded has the processor for its first answers, before `on_loaded`."""


class OnDemandLimits(NamedTuple):
    """`idle`, `resident`: seconds for which a model must have had no request, and have been in memory, before it makes
    room. `loads`: at once. `wait`: seconds that a request waits for its model. `waiting`, `tenant_waiting`: requests
    that wait at once, of all and of one tenant."""

    idle: float
    resident: float
    loads: int
    wait: float
    waiting: int
    tenant_waiting: int


class FailedLoads(NamedTuple):
    """The loads of a model that failed, one after the other: how many times, why the last did, and until when there is
    no other."""

    times: int
    reason: str
    retry_at: float


class OnDemandLoader:
    """Loads the models of a catalog into a registry when they are asked for, and takes others out of memory for them.
    `on_loaded` is called some time after each load."""

    def __init__(
        self,
        catalog: RepositoryCatalog,
        registry: ModelRegistry,
        lifecycle: ModelLifecycle,
        limits: OnDemandLimits,
        on_loaded: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._catalog = catalog
        self._registry = registry
        self._lifecycle = lifecycle
        self._limits = limits
        self._on_loaded = on_loaded
        self._clock = clock
        self._turns = asyncio.Semaphore(limits.loads)
        self._loads: dict[str, asyncio.Task[None]] = {}
        self._waiting: Counter[str] = Counter()
        self._failed: dict[str, FailedLoads] = {}
        self._evicted_at: dict[str, float] = {}
        self._load_waits: dict[str, TimeInState] = {}
        self._said_at = -_SAY_AGAIN
        self._loaded = self._evictions = self._reloads = 0
        lifecycle.make_room = self._make_room

    async def provide(self, name: str, tenant: str) -> None:
        """Return when a model is in memory: it is loaded, unless it is being loaded already.

        Raises:
            NotReady: too many wait, it takes too long, or there is no room beside what is in use.
            Unavailable: it does not load; `retry_after` tells when that is tried again.
        """
        self._check_failed(name)
        if self._waiting.total() >= self._limits.waiting:
            raise NotReady(f"model '{name}' is not in memory: {self._limits.waiting} requests wait for models")
        if self._waiting[tenant] >= (most := self._limits.tenant_waiting):
            raise NotReady(f"model '{name}' is not in memory: {most} requests of this tenant wait for models")
        load = self._loads.get(name) or self._begin(name)
        self._waiting[tenant] += 1
        waits = self._load_waits.setdefault(name, TimeInState(self._clock))
        waits.add(1)
        try:
            await asyncio.wait({load}, timeout=self._limits.wait)
        finally:
            waits.add(-1)
            self._waiting[tenant] -= 1
            if not self._waiting[tenant]:
                del self._waiting[tenant]
        if not load.done():
            raise NotReady(f"model '{name}' is being loaded, for more than {self._limits.wait:g} s now")
        load.result()

    def forget_failure(self, name: str) -> None:
        """Its files have changed: the next request tries again."""
        self._failed.pop(name, None)

    def _check_failed(self, name: str) -> None:
        failed = self._failed.get(name)
        if failed is not None and (left := failed.retry_at - self._clock()) > 0:
            error = Unavailable(f"model '{name}' failed to load, and is tried again in {left:.0f} s: {failed.reason}")
            error.retry_after = left
            raise error

    def _begin(self, name: str) -> asyncio.Task[None]:
        load = self._loads[name] = asyncio.create_task(self._load(name), name=f"load {name} on demand")
        load.add_done_callback(self._end)
        return load

    def _end(self, load: asyncio.Task[None]) -> None:
        self._loads = {name: running for name, running in self._loads.items() if running is not load}
        if not load.cancelled():
            load.exception()  # told to whoever waits, and nobody may

    async def _load(self, name: str) -> None:
        async with self._turns:
            self._note_reload(name)
            try:
                source, release = await self._lifecycle.read(self._catalog, name)
                seconds = await self._lifecycle.run_to_completion(self._lifecycle.load(source, release=release))
            except ServerExiting:
                raise
            except (LoadFailure, CharoniaError) as error:
                if isinstance(error, CharoniaError):  # it could not be read
                    entry = self._registry.get_or_add(name)
                    entry.record_load_failure(error.message, entry.versions)
                cause = error.cause if isinstance(error, LoadFailure) else error
                if isinstance(cause, InsufficientMemory):
                    raise NotReady(f"there is no room for it beside the models in use: {cause.message}") from None
                raise self._note_failure(name, str(cause)) from None
            self._failed.pop(name, None)
            self._loaded += 1
            log.info("model '%s' is in memory after %.2f s, for a request", name, seconds)
        asyncio.get_running_loop().call_later(_BREATH, self._on_loaded)

    def _note_failure(self, name: str, reason: str) -> Unavailable:
        before = self._failed[name].times if name in self._failed else 0
        pause = min(_FIRST_PAUSE * 2**before, _LONGEST_PAUSE)
        self._failed[name] = FailedLoads(before + 1, reason, self._clock() + pause)
        log.error("model '%s' failed to load for a request: %s", name, reason)
        error = Unavailable(f"model '{name}' failed to load: {reason}")
        error.retry_after = pause
        return error

    def _note_reload(self, name: str) -> None:
        """Notice a model that made room a moment ago."""
        now = self._clock()
        gone = now - self._evicted_at.pop(name, -_SOON)
        if gone >= _SOON:
            return
        self._reloads += 1
        if now - self._said_at >= _SAY_AGAIN:
            self._said_at = now
            log.warning(
                "models take turns in memory: '%s' made room %.0f s ago and is asked for again; more memory ends that, "
                "or a longer --min-resident-secs slows it",
                name,
                gone,
            )

    def _make_room(self, wanted: InsufficientMemory, name: str) -> bool:
        """Take models out of memory until there is room for another; whether any was. None is if all would not do."""
        held = Counter[str]()
        for claim in wanted.memory.reservations:
            held[claim.name] += claim.size
        idle = [entry for entry in self._idle() if entry.name != name and held[entry.name]]
        if sum(held[entry.name] for entry in idle) < wanted.missing:
            return False
        missing = wanted.missing
        for entry in idle:
            if missing > 0:
                missing -= held[entry.name]
                self._lifecycle.evict(entry)
                self._evicted_at[entry.name] = self._clock()
                self._evictions += 1
                log.info("model '%s' makes room in memory for '%s'", entry.name, name)
        return True

    def _idle(self) -> Sequence[ModelEntry]:
        """The models that may make room, the one that was idle longest first."""
        entries = [entry for entry in self._registry.entries.values() if self._may_go(entry)]
        return sorted(entries, key=_idle_since)

    def _may_go(self, entry: ModelEntry) -> bool:
        loaded = entry.loaded_versions.values()
        held = entry.pinned or entry.change_lock.locked() or bool(entry.adapters)
        return bool(loaded) and not held and all(map(self._is_idle, loaded))

    def _is_idle(self, loaded: LoadedModel) -> bool:
        now = self._clock()
        if loaded.in_flight.count or now - loaded.loaded_at < self._limits.resident:
            return False
        return now - loaded.in_flight.idle_since >= self._limits.idle and not loaded.model.stats().sequences

    def measure(self) -> Measurement:
        """The counts, for a scrape."""
        return Measurement({}, tuple(self._readings()))

    def _readings(self) -> Iterator[Reading]:
        yield Reading("charonia_on_demand_loads_total", self._loaded)
        yield Reading("charonia_on_demand_evictions_total", self._evictions)
        yield Reading("charonia_on_demand_reloads_total", self._reloads)
        yield Reading("charonia_on_demand_waiting_requests", self._waiting.total())
        for name, waits in self._load_waits.items():
            yield Reading("charonia_load_wait_seconds_total", waits.seconds, {"model": name})


def _idle_since(entry: ModelEntry) -> float:
    return max(loaded.in_flight.idle_since for loaded in entry.loaded_versions.values())
