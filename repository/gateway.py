"""The gateway in process: endpoints and models live in one event loop.

Knows nothing of protocols, and of models only the contract.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from ..core.errors import ServerExiting
from ..core.gateway import NO_FILES, ModelState, RepositoryIndexEntry
from ..core.metrics import Measurement
from ..core.model import Model, ModelConfig
from ..core.request_context import Headers, RequestContext, RequestEnd
from ..core.statistics import ModelStatistics
from ..telemetry.llm_metrics import ended_readings
from ..telemetry.request_log import log_request
from ..telemetry.shared_state import SharedState
from .builder import ModelBuilder
from .lifecycle import LoadFailure, ModelLifecycle
from .model_control import ModelControl, NoModelControl
from .model_entry import InFlightCounter
from .model_handle import LoadedModelHandle
from .model_registry import ModelRegistry


class InProcessGateway:
    """The models of the server, and the requests to them.

    With `strict`, the server is ready only when every known model is; nothing is ready while the process is not
    `healthy`. Each of `end_listeners` is called with the context of every request that ended.
    """

    def __init__(
        self,
        strict: bool = True,
        healthy: Callable[[], bool] = lambda: True,
        end_listeners: Sequence[Callable[[RequestContext], None]] = (log_request,),
        commons: SharedState | None = None,
        builder: ModelBuilder | None = None,
    ) -> None:
        self.shared_state = commons or SharedState()
        self.registry = ModelRegistry()
        builder = builder or ModelBuilder()
        self.lifecycle = ModelLifecycle(self.registry, builder)
        self.model_control: ModelControl = NoModelControl()
        self._strict = strict
        self._healthy = healthy
        self._end_listeners = end_listeners
        self._budget = builder.budget
        self._ended_without_model: Counter[RequestEnd] = Counter()
        self._in_flight = InFlightCounter()
        self._exiting = False

    # For endpoints

    def ready(self) -> bool:
        if self._exiting or not self._healthy():
            return False
        return not self._strict or self.registry.ready()

    def exiting(self) -> bool:
        return self._exiting

    def model_configs(self) -> list[ModelConfig]:
        latest = (entry.latest for entry in self.registry.entries.values())
        return [version.loaded.config for version in latest if version is not None and version.loaded is not None]

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        return self.registry.find_loaded(name, version).config

    def is_model_ready(self, name: str, version: str = "") -> bool:
        entry = self.registry.entries.get(name)
        found = None if entry is None else entry.find_version(version)
        return not self._exiting and self._healthy() and found is not None and found.ready

    def served_versions(self, name: str) -> tuple[str, ...]:
        self.registry.find_loaded(name)
        return tuple(version.number for version in self.registry.entries[name].loaded_versions)

    def model_statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        return self.registry.statistics(name, version)

    def repository_index(self, ready_only: bool = False) -> list[RepositoryIndexEntry]:
        known = self.registry.index()
        names = {entry.name for entry in known}
        whole = [
            *known,
            *(RepositoryIndexEntry(name) for name in self.model_control.loadable_models() if name not in names),
        ]
        return [entry for entry in whole if not ready_only or entry.state is ModelState.READY]

    async def load_model(self, name: str, config: str | None = None, files: Mapping[str, bytes] = NO_FILES) -> None:
        self._refuse_when_exiting()
        await self.model_control.load(name, config, files)

    async def unload_model(self, name: str) -> None:
        await self.model_control.unload(name)

    def open_request(self, endpoint: str, headers: Headers = ()) -> RequestContext:
        context = RequestContext(endpoint, headers)
        context.on_end(self._on_request_end)
        return context

    def acquire(self, context: RequestContext, name: str, version: str = "") -> LoadedModelHandle:
        loaded = self.registry.find_loaded(name, version, context)
        return LoadedModelHandle(loaded, context, self._in_flight, self.exiting, self.shared_state.traces)

    # For the composition root

    async def load_built_model(self, name: str, version: str, build: Callable[[], Model]) -> Exception | None:
        """Serve a model that is made by hand; what goes wrong is this model's trouble alone, and is returned."""
        try:
            await self.lifecycle.serve_built_model(name, version, build)
        except LoadFailure as failure:
            return failure.cause
        return None

    def measurements(self) -> Iterator[Measurement]:
        """What there is to know of each model at a scrape, and of requests that were for none."""
        yield Measurement({}, tuple(ended_readings(self._ended_without_model)))
        yield from self.registry.measurements()
        for held in self._budget.measurements():
            yield held._replace(labels=self.registry.labels(held.labels["model"], held.labels["version"]))

    def begin_exit(self) -> None:
        """Refuse what is new from here on, and the loads and unloads that clients wait for."""
        self._exiting = True
        self.lifecycle.cancel_client_changes()

    @property
    def requests_in_flight(self) -> int:
        """Requests that are being answered."""
        return self._in_flight.count

    async def wait_drained(self) -> None:
        """Return when no request runs."""
        await self._in_flight.wait_drained()

    async def unload_all(self) -> None:
        """Unload every model, whatever one of them says."""
        await self.lifecycle.close()

    def _on_request_end(self, context: RequestContext) -> None:
        if not context.counted:
            self._count_request(context)
        for listener in self._end_listeners:
            listener(context)

    def _count_request(self, context: RequestContext) -> None:
        """Count a request that held no model: with the version it was for, or the latest, if that counts; any name that
        a client makes up would be a series forever."""
        entry = self.registry.entries.get(context.model) if context.model_found else None
        version = None if entry is None else entry.versions.get(context.version) or entry.latest
        loaded = None if version is None else version.loaded
        if loaded is not None and loaded.measured is not None:
            loaded.measured.count(context)
        elif context.end is not None:
            self._ended_without_model[context.end] += 1

    def _refuse_when_exiting(self) -> None:
        if self._exiting:
            raise ServerExiting
