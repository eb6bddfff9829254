"""The registry of the models that the server knows: their versions, loaded or not, and the lookup in it."""

import asyncio
import time
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field

from ..core.adapter import Adapter
from ..core.errors import InvalidArgument, NotFound, NotReady, Unavailable
from ..core.gateway import ModelState, RepositoryIndexEntry
from ..core.metrics import Labels, Measurement, ModelStatistics, Reading
from ..core.model import Capabilities, Model, ModelConfig
from ..core.request import InferRequest, InferResponse
from ..core.request_context import DONE, ExecutionTimes, RequestContext, end_for_error
from .file_marks import SourceMark
from .request_validation import validate_request

UNLOADED = "unloaded"
ON_DEMAND = "on demand"


class NotResident(NotReady):
    """A model that its next request loads is not in memory. `name`: its own."""

    def __init__(self, name: str) -> None:
        super().__init__(f"model '{name}' is not in memory: its next request loads it")
        self.name = name


class InFlightCounter:
    """The requests in flight of one loaded model, or of the server. `idle_since`: since when there is none, by the
    monotonic clock."""

    __slots__ = ("_idle", "count", "idle_since")

    def __init__(self) -> None:
        self.count = 0
        self.idle_since = time.monotonic()
        self._idle: asyncio.Event | None = None

    def increment(self) -> None:
        self.count += 1

    def touch(self) -> None:
        """Note that there was a request just now."""
        self.idle_since = time.monotonic()

    def decrement(self) -> None:
        self.count -= 1
        if not self.count:
            self.idle_since = time.monotonic()
            if self._idle is not None:
                self._idle.set()

    async def wait_drained(self) -> None:
        """Return when no request is in flight."""
        while self.count:
            self._idle = asyncio.Event()
            await self._idle.wait()


@dataclass(slots=True)
class LoadedModel:
    """A loaded model. `source_mark`: see `VersionSource.mark`. `resources` are closed when it is unloaded; `in_flight`
    counts its requests; `loaded_at`: when its load ended, by the monotonic clock."""

    model: Model
    config: ModelConfig
    load_seconds: float = 0.0
    source_mark: SourceMark | None = None
    resources: ExitStack = field(default_factory=ExitStack)
    in_flight: InFlightCounter = field(default_factory=InFlightCounter)
    loaded_at: float = field(default_factory=time.monotonic)
    steps: Hashable = None
    """What the steps of an ensemble took and made when it was checked against them."""
    unfit: str = ""
    """Why they do not fit it any more: it answers nothing until they do."""
    capabilities: Capabilities = field(init=False)

    def __post_init__(self) -> None:
        self.capabilities = self.model.capabilities

    def answer_now(self, request: InferRequest) -> tuple[InferResponse, ExecutionTimes] | None:
        """See `core.gateway.InlineHandle`."""
        inline = self.capabilities.inline
        if inline is None:
            return None
        try:
            validate_request(self.config, request)
        except InvalidArgument:
            return None
        self.in_flight.touch()
        try:
            answer = inline.answer_now(request)
        except Exception as error:
            inline.count_end(end_for_error(error, submitted=False))
            raise
        if answer is not None:
            inline.count_end(DONE)
        return answer


@dataclass(slots=True)
class ModelVersion:
    """A version that is served, or was meant to be. `loaded` is set while it is in memory; `state` and `reason` say why
    it is not. `failure`: why its last load failed, whatever serves meanwhile. `described`: the config of one that its
    next request loads."""

    number: str
    loaded: LoadedModel | None = None
    state: ModelState = ModelState.UNAVAILABLE
    reason: str = ""
    failure: str = ""
    described: ModelConfig | None = None

    @property
    def config(self) -> ModelConfig | None:
        """None for a version that is not served."""
        return self.described if self.loaded is None else self.loaded.config

    @property
    def ready(self) -> bool:
        if self.loaded is None:
            return self.described is not None and not self.failure
        return not self.loaded.unfit and self.loaded.model.stats().ready

    def index_entry(self, name: str, model_failure: str) -> RepositoryIndexEntry:
        """`model_failure`: why the last load of the model as a whole failed, whatever serves meanwhile."""
        state, failure = self.state, self.reason
        if self.loaded is not None:
            state = ModelState.READY if self.ready else ModelState.UNAVAILABLE
            failure = self.loaded.unfit or self.failure
        return RepositoryIndexEntry(name, self.number, state, model_failure or failure)


@dataclass(slots=True)
class ModelEntry:
    """A known model."""

    name: str
    versions: dict[str, ModelVersion] = field(default_factory=dict)
    latest: ModelVersion | None = None

    awaited: bool = False
    """It is one of those of the start, and has neither served nor been unloaded since."""

    pinned: bool = False
    """It stays in memory, whoever needs that."""

    routed: frozenset[str] = frozenset()
    """The versions that are served for routes alone, none of which is the latest."""

    reason: str = ""
    """Why its last load failed as a whole, whatever serves meanwhile."""

    changed_in_load: frozenset[str] = frozenset()
    """What changed beside its versions while they loaded the last time."""

    failures: Counter[str] = field(default_factory=Counter)
    """Failed loads by version."""

    change_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while versions load, or wait for that, and while they are taken out of service."""

    @property
    def ready(self) -> bool:
        """Whether every version in memory is."""
        return all(version.ready for version in self.versions.values() if version.loaded is not None)

    @property
    def sorted_versions(self) -> list[ModelVersion]:
        """Every known version, lowest first."""
        return sorted(self.versions.values(), key=lambda version: int(version.number))

    @property
    def loaded_versions(self) -> dict[str, LoadedModel]:
        """The loaded models by version, lowest first."""
        return {version.number: version.loaded for version in self.sorted_versions if version.loaded is not None}

    @property
    def served_versions(self) -> list[str]:
        """The numbers of those that answer, in memory or not, lowest first."""
        return [version.number for version in self.sorted_versions if version.config is not None]

    @property
    def takes_adapters(self) -> bool:
        """Whether the latest version does."""
        return self._latest_adapters is not None

    @property
    def adapters(self) -> Mapping[str, Adapter]:
        """The adapters of the latest version."""
        return self._latest_adapters or {}

    @property
    def _latest_adapters(self) -> Mapping[str, Adapter] | None:
        loaded = None if self.latest is None else self.latest.loaded
        return None if loaded is None or loaded.capabilities.adapters is None else loaded.capabilities.adapters.adapters

    def find_version(self, number: str = "") -> ModelVersion | None:
        """The version of that number, or without a number the latest that is served."""
        return self.versions.get(number) if number else self.latest

    def get_or_add_version(self, number: str) -> ModelVersion:
        return self.versions.setdefault(number, ModelVersion(number))

    def publish(self, new: Mapping[str, LoadedModel]) -> list[LoadedModel]:
        """Serve these versions and no others from now on; returns what is no longer served."""
        old = self.loaded_versions
        for number in {*new, *self.versions}:
            version = self.get_or_add_version(number)
            version.loaded, version.described = new.get(number), None
            version.state = ModelState.READY if number in new else ModelState.UNAVAILABLE
            version.reason, version.failure = "" if number in new else UNLOADED, ""
        self.reason, self.awaited = "", False
        self.latest = self._latest_of(new)
        return [loaded for number, loaded in old.items() if loaded is not new.get(number)]

    def describe(self, configs: Mapping[str, ModelConfig]) -> None:
        """Serve these versions as soon as they are asked for: none of the model is in memory."""
        for number, config in configs.items():
            version = self.get_or_add_version(number)
            version.described = config
            version.state = ModelState.UNAVAILABLE
            version.reason = ON_DEMAND
        self.latest = self._latest_of(configs)

    def _latest_of(self, numbers: Collection[str]) -> ModelVersion | None:
        own = [number for number in numbers if number not in self.routed] or numbers
        return self.versions[max(own, key=int)] if own else None

    def drop(self, numbers: Collection[str]) -> list[LoadedModel]:
        """Serve these versions no longer; returns those of them that were loaded."""
        loaded = {number: model for number, model in self.loaded_versions.items() if number not in numbers}
        described = {number: state.described for number, state in self.versions.items() if number not in numbers}
        old = self.publish(loaded)
        if not loaded:
            self.describe({number: config for number, config in described.items() if config is not None})
        return old

    def evict(self) -> list[LoadedModel]:
        """Take what is loaded out of service, until the next request; returns it."""
        configs = {number: loaded.config for number, loaded in self.loaded_versions.items()}
        old = self.publish({})
        self.describe(configs)
        return old

    def record_load_failure(self, reason: str, numbers: Iterable[str] = ()) -> None:
        """Record that these versions, or without any the model as a whole, did not load; what is served stays."""
        numbers = tuple(numbers)
        self.failures.update(numbers or ("",))
        if not numbers:
            self.reason = reason
        for number in numbers:
            version = self.get_or_add_version(number)
            version.failure = reason
            if version.loaded is None:
                version.state, version.reason = ModelState.UNAVAILABLE, reason

    def index(self) -> list[RepositoryIndexEntry]:
        if not self.versions:
            return [RepositoryIndexEntry(self.name, "", ModelState.UNAVAILABLE, self.reason)]
        return [version.index_entry(self.name, self.reason) for version in self.sorted_versions]

    def statistics(self, wanted: str = "") -> list[ModelStatistics]:
        return [
            ModelStatistics(self.name, number, loaded.model.statistics())
            for number, loaded in self.loaded_versions.items()
            if wanted in ("", number)
        ]

    def measurements(self) -> Iterator[Measurement]:
        """The readings of each version, also of those that never loaded, and of the model as a whole, without a number,
        if that failed to load. Of what was unloaded none but the count of failures is left: nobody waits for it."""
        for number in sorted({*self.versions, *self.failures}):
            as_a_whole = ModelVersion(number, reason=self.reason or UNLOADED, failure=self.reason)
            version = self.versions.get(number, as_a_whole)
            yield Measurement(self.labels(number), tuple(self._readings(version)))

    def _readings(self, version: ModelVersion) -> Iterator[Reading]:
        yield Reading("charonia_model_load_failures_total", self.failures[version.number])
        if version.reason == UNLOADED:
            return
        yield Reading("charonia_model_last_load_failed", int(bool(version.failure)))
        yield Reading("charonia_model_ready", int(version.ready))
        yield Reading("charonia_model_resident", int(version.loaded is not None))
        if version.loaded is not None:
            yield Reading("nv_model_load_duration_secs", version.loaded.load_seconds)
            if version.loaded.capabilities.measured is not None:
                yield from version.loaded.capabilities.measured.readings()

    def labels(self, number: str) -> Labels:
        """The labels of all measurements of a version."""
        loaded = self.versions[number].loaded if number in self.versions else None
        tags = {} if loaded is None else loaded.config.raw.get("metric_tags", {})
        return {"model": self.name, "version": number, **{f"_{tag}": value for tag, value in tags.items()}}


class ModelRegistry:
    """Every known model by its name. `aliases`: other names of some, which win over a model that has one for a name.
    `starting`: the loads of the server's start go on."""

    def __init__(self) -> None:
        self.entries: dict[str, ModelEntry] = {}
        self.aliases: dict[str, str] = {}
        self.route_names: frozenset[str] = frozenset()
        """Names of routes, by which no model may be loaded."""
        self.routed_models: frozenset[str] = frozenset()
        """The models that routes ask."""
        self.implicit: set[str] = set()
        """Models that were loaded because others ask them, and not by name."""
        self.starting = False

    @property
    def ready(self) -> bool:
        """Whether each model of the start has served, or was unloaded, and all that is in memory is ready: a load that
        fails later, of a new version or model, leaves the server as it was."""
        return all(entry.ready and not entry.awaited for entry in self.entries.values())

    def find(self, name: str) -> ModelEntry | None:
        """The model of that name, or that has it as another one, or an adapter of that name."""
        return self.resolve(name)[0]

    def resolve(self, name: str) -> tuple[ModelEntry | None, str]:
        """The model that a request for `name` is for, None if there is none, and the adapter, empty for the model
        itself. An adapter goes by its own name if no model and no other adapter has it, and by `model:adapter`."""
        entry = self._find_model(name)
        if entry is not None:
            return entry, ""
        owners = self._adapter_owners(name)
        if len(owners) == 1:
            return owners[0], name
        for model in (*self.aliases, *self.entries):
            adapter = name.removeprefix(f"{model}:")
            entry = None if adapter == name else self._find_model(model)
            if entry is not None and adapter in entry.adapters:
                return entry, adapter
        return None, ""

    def _find_model(self, name: str) -> ModelEntry | None:
        return self.entries.get(self.aliases.get(name, name))

    def _adapter_owners(self, name: str) -> list[ModelEntry]:
        return [entry for entry in self.entries.values() if name in entry.adapters]

    def get_or_add(self, name: str) -> ModelEntry:
        return self.entries.setdefault(name, ModelEntry(name))

    def find_loaded(self, name: str, number: str = "", context: RequestContext | None = None) -> LoadedModel:
        """The loaded model of that version, or of the latest; sets the model, by its own name, the adapter and the
        version of `context`. Raises as `find_served`, and `NotResident`."""
        version = self.find_served(name, number, context)
        if version.loaded is None:
            assert version.described is not None
            raise NotResident(version.described.name)
        if version.loaded.unfit:
            raise Unavailable(f"Request for unknown model: '{name}' is not at ready state: {version.loaded.unfit}")
        return version.loaded

    def find_config(self, name: str, number: str = "") -> ModelConfig:
        """The config of a version, in memory or not. Raises as `find_served`."""
        config = self.find_served(name, number).config
        assert config is not None
        return config

    def find_served(self, name: str, number: str = "", context: RequestContext | None = None) -> ModelVersion:
        """That version, or the latest, in memory or not. `context`: see `find_loaded`.

        Raises:
            NotFound: no such model or version, or none of its versions is served.
            Unavailable: that version is not served.
            NotReady: the model is being loaded, or the server starts and may know it soon.
        """
        entry, adapter = self.resolve(name)
        if context is not None:
            context.model, context.version = name if entry is None else entry.name, number
            context.model_found, context.adapter = entry is not None, adapter
        if entry is None and self.starting:  # nor are adapters and other names known before their models
            raise NotReady(f"Request for unknown model: '{name}' is not found while the server starts")
        if entry is None:
            owners = [f"'{entry.name}:{name}'" for entry in self._adapter_owners(name)]
            hint = f"; several models have such an adapter: ask for {' or '.join(owners)}" if owners else ""
            raise NotFound(f"Request for unknown model: '{name}' is not found{hint}")
        version = entry.find_version(number)
        loading = self.starting or entry.change_lock.locked()
        if version is None and number and not self.starting:
            raise NotFound(f"Request for unknown model: '{name}' version {number} is not found")
        if context is not None and version is not None:
            context.version = version.number
        if version is not None and version.config is not None:
            return version
        if number:
            message = f"Request for unknown model: '{name}' version {number} is not at ready state"
            raise NotReady(message) if loading else Unavailable(message)
        if loading:
            raise NotReady(f"Request for unknown model: '{name}' is not at ready state: it is being loaded")
        raise NotFound(f"Request for unknown model: '{name}' has no available versions")
