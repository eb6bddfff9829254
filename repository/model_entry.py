"""One model of the registry: its versions, loaded or not, and the latest of them."""

import asyncio
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field

from ..core.gateway import ModelState, RepositoryIndexEntry
from ..core.metrics import Labels, Measurement, Reading
from ..core.model import MeasuredModel, Model, ModelConfig, TextModel
from ..core.statistics import ModelStatistics

UNLOADED = "unloaded"


class InFlightCounter:
    """Requests that are in flight now: of one loaded model, or of the server."""

    __slots__ = ("_idle", "count")

    def __init__(self) -> None:
        self.count = 0
        self._idle: asyncio.Event | None = None

    def increment(self) -> None:
        self.count += 1

    def decrement(self) -> None:
        self.count -= 1
        if not self.count and self._idle is not None:
            self._idle.set()

    async def wait_drained(self) -> None:
        """Return when no request is in flight."""
        while self.count:
            self._idle = asyncio.Event()
            await self._idle.wait()


@dataclass(slots=True)
class LoadedModel:
    """A loaded model. `text` and `measured` are the same model if it has those protocols; `in_flight` counts its
    requests; `release` frees its source once it is unloaded; `source_mark`: see `VersionSource.mark`."""

    model: Model
    config: ModelConfig
    in_flight: InFlightCounter = field(default_factory=InFlightCounter)
    load_seconds: float = 0.0
    source_mark: Hashable = None
    release: Callable[[], None] = lambda: None
    text: TextModel | None = field(init=False)
    measured: MeasuredModel | None = field(init=False)

    def __post_init__(self) -> None:
        self.text = self.model if isinstance(self.model, TextModel) else None
        self.measured = self.model if isinstance(self.model, MeasuredModel) else None

    @property
    def ready(self) -> bool:
        return self.model.stats().ready


@dataclass(slots=True)
class ModelVersion:
    """A version that is served, or was meant to be. `loaded` is set while it is served; `state` and `reason` say why it
    is not."""

    number: str
    loaded: LoadedModel | None = None
    state: ModelState = ModelState.UNAVAILABLE
    reason: str = ""

    @property
    def ready(self) -> bool:
        return self.loaded is not None and self.loaded.ready

    def index_entry(self, name: str) -> RepositoryIndexEntry:
        if self.loaded is None:
            return RepositoryIndexEntry(name, self.number, self.state, self.reason)
        return RepositoryIndexEntry(
            name, self.number, ModelState.READY if self.loaded.ready else ModelState.UNAVAILABLE, self.reason
        )


@dataclass(slots=True)
class ModelEntry:
    """A known model. `wanted`: it is to be served; nobody waits for one that a user unloaded. `reason`: why there are
    no versions. `failures`: loads that failed, by version. `changing`: held while versions load, or wait for that, and
    while they are taken out of service."""

    name: str
    versions: dict[str, ModelVersion] = field(default_factory=dict)
    latest: ModelVersion | None = None
    should_serve: bool = True
    reason: str = ""
    failures: Counter[str] = field(default_factory=Counter)
    change_lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def ready(self) -> bool:
        """Whether every version that is to be served is ready."""
        wanted = [version for version in self.versions.values() if version.reason != UNLOADED]
        return bool(wanted) and all(version.ready for version in wanted)

    @property
    def loaded_versions(self) -> list[ModelVersion]:
        """Lowest first."""
        return [version for _, version in sorted(self.versions.items(), key=_number) if version.loaded is not None]

    def find_version(self, number: str = "") -> ModelVersion | None:
        """The version of that number, or without a number the latest that is served."""
        return self.versions.get(number) if number else self.latest

    def get_or_add_version(self, number: str) -> ModelVersion:
        """The version of that number, which is known from then on."""
        return self.versions.setdefault(number, ModelVersion(number))

    def publish(self, serving: Iterable[tuple[str, LoadedModel]]) -> list[LoadedModel]:
        """Serve these from now on and no others; those that are no longer served."""
        new = dict(serving)
        old = {version.number: version.loaded for version in self.loaded_versions if version.loaded is not None}
        for number in {*new, *self.versions}:
            version = self.get_or_add_version(number)
            version.loaded = new.get(number)
            version.state = ModelState.READY if number in new else ModelState.UNAVAILABLE
            version.reason = "" if number in new else UNLOADED
        self.reason = ""
        self.latest = max((self.versions[number] for number in new), key=lambda one: int(one.number), default=None)
        return [each for number, each in old.items() if each is not new.get(number)]

    def record_load_failure(self, reason: str, numbers: Iterable[str] = ()) -> None:
        """Note that a load failed; what is served stays."""
        numbers = tuple(numbers)
        self.failures.update(numbers or ("",))
        if not numbers and not self.loaded_versions:
            self.reason = reason
        for number in numbers:
            version = self.get_or_add_version(number)
            if version.loaded is None:
                version.state, version.reason = ModelState.UNAVAILABLE, reason

    def index(self) -> list[RepositoryIndexEntry]:
        if not self.versions:
            return [RepositoryIndexEntry(self.name, "", ModelState.UNAVAILABLE, self.reason)]
        return [version.index_entry(self.name) for _, version in sorted(self.versions.items(), key=_number)]

    def statistics(self, number: str = "") -> list[ModelStatistics]:
        wanted = (version for version in self.loaded_versions if number in ("", version.number))
        return [
            ModelStatistics(self.name, version.number, version.loaded.model.statistics())
            for version in wanted
            if version.loaded is not None
        ]

    def measurements(self) -> Iterator[Measurement]:
        """Of a version that is not loaded, only that it is not."""
        for number in sorted({*self.versions, *self.failures}):
            version = self.versions.get(number, ModelVersion(number))
            yield Measurement(self.labels(number), tuple(self._readings(version)))

    def _readings(self, version: ModelVersion) -> Iterator[Reading]:
        yield Reading("charonia_model_ready", int(version.ready))
        yield Reading("charonia_model_load_failures_total", self.failures[version.number])
        if version.loaded is not None:
            yield Reading("nv_model_load_duration_secs", version.loaded.load_seconds)
            if version.loaded.measured is not None:
                yield from version.loaded.measured.readings()

    def labels(self, number: str) -> Labels:
        """Of everything that is measured of a version."""
        serving = self.versions[number].loaded if number in self.versions else None
        tags = {} if serving is None else serving.config.raw.get("metric_tags", {})
        return {"model": self.name, "version": number, **{f"_{tag}": value for tag, value in tags.items()}}


def _number(item: tuple[str, ModelVersion]) -> int:
    return int(item[0])
