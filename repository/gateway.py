"""The gateway in process: which models there are, who answers a request, what is counted. It lives in one event loop.

Knows nothing of protocols, and of models only the contract.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..core.adapter import Adapter
from ..core.errors import CharoniaError, InvalidArgument, ServerExiting, Unavailable
from ..core.gateway import NO_FILES, ModelState, RepositoryIndexEntry, ServedAdapter
from ..core.metrics import Measurement, ModelStatistics
from ..core.model import ModelConfig, TextModel
from ..core.request import InferRequest, InferResponse
from ..core.request_context import Headers, RequestContext, RequestEnd
from ..telemetry import request_log
from ..telemetry.llm_metrics import ended_readings
from ..telemetry.request_log import log_request
from ..telemetry.shared_state import SharedState
from .adapter_control import AdapterControl
from .builder import ModelBuilder
from .catalog import RepositoryCatalog
from .lifecycle import ModelLifecycle
from .model_control import ModelControl
from .model_handle import LoadedModelHandle, LoadedResidentHandle, RoutedModelHandle
from .model_registry import InFlightCounter, LoadedModel, ModelRegistry, ModelVersion, NotResident
from .on_demand import OnDemandLoader
from .route_control import RouteControl
from .route_table import RouteTable, ServedRoute

_FEW_MODELS = 32
"""So many are looked at before a body that names one is read."""


class InProcessGateway:
    """The models of the server, and the requests to them.

    With `strict`, the server is ready when its registry is, else at once; nothing is ready while the process is not
    `healthy`. Each of `end_listeners` is called with the context of every request that ended.
    """

    def __init__(
        self,
        strict: bool = True,
        healthy: Callable[[], bool] = lambda: True,
        end_listeners: Sequence[Callable[[RequestContext], None]] = (log_request,),
        shared_state: SharedState | None = None,
        builder: ModelBuilder | None = None,
    ) -> None:
        builder = builder or ModelBuilder()
        self.shared_state = shared_state or SharedState()
        self.registry = ModelRegistry()
        self.routes = RouteTable(self.registry)
        self.lifecycle = ModelLifecycle(self.registry, builder, self)
        self.route_control = RouteControl(self.routes, self.lifecycle, RepositoryCatalog())
        self._adapters = AdapterControl(self.registry)
        self.model_control: ModelControl | None = None
        """Set in mode explicit."""
        self.on_demand: OnDemandLoader | None = None
        """Set where requests load models."""
        self.in_flight = InFlightCounter()
        """The requests that are being answered."""
        self._strict = strict
        self._healthy = healthy
        self._end_listeners = [(listener, False) for listener in end_listeners]  # and whether it is for routes alone
        self._observed = False
        """Whether a listener to all requests was added later."""
        self._budget, self._limiter = builder.budget, builder.limiter
        self._ended_without_model: Counter[RequestEnd] = Counter()
        self._draining = self._exiting = False

    # For endpoints

    def alive(self) -> bool:
        return True

    def ready(self) -> bool:
        if self._draining or not self._healthy():
            return False
        return not self._strict or self.registry.ready

    def exiting(self) -> bool:
        return self._exiting

    @property
    def draining(self) -> bool:
        """Whether nothing is ready any more, whatever is still answered."""
        return self._draining

    def requests_in_flight(self) -> int:
        return self.in_flight.count

    async def tokenizer_info(self, name: str) -> dict[str, Any]:
        return await self.text_model(name).tokenizer_info()

    def text_model(self, name: str) -> TextModel:
        """The loaded language model of that name. Raises `InvalidArgument` for another model."""
        route = self.routes.find(name, "")
        loaded = (
            next(filter(None, route.loaded()), None) if route is not None else self.registry.find_served(name).loaded
        )
        if loaded is None or loaded.capabilities.text is None:
            raise InvalidArgument(f"model '{name}' has no tokenizer to tell of", field="model")
        return loaded.capabilities.text

    def model_configs(self) -> list[ModelConfig]:
        latest = (entry.latest for entry in self.registry.entries.values())
        models = [version.config for version in latest if version is not None and version.config is not None]
        return [*models, *(route.config() for route in self.routes.served.values() if route.ready)]

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        route = self.routes.find(name, version)
        if route is not None:
            return route.config()
        return self.registry.find_config(name, version)

    def is_model_ready(self, name: str, version: str = "") -> bool:
        served: ServedRoute | ModelVersion | None = None if version else self.routes.served.get(name)
        entry = None if served else self.registry.find(name)
        if entry is not None:
            served = entry.find_version(version)
        return not self._draining and self._healthy() and served is not None and served.ready

    async def unready_reason(self, name: str, version: str = "") -> str:
        if not self.is_model_ready(name, version):
            return "Model version not ready"
        route = self.routes.served.get(name)
        loaded = [self.registry.find_served(name, version).loaded] if route is None else route.loaded()
        checks = [model.capabilities.self_check for model in loaded if model is not None]
        return next(filter(None, [await check.unready_reason() for check in checks if check is not None]), "")

    def served_versions(self, name: str) -> tuple[str, ...]:
        route = self.routes.served.get(name)
        if route is not None:
            return tuple(sorted({config.version for config in route.configs()}, key=int))
        self.registry.find_served(name)
        entry = self.registry.find(name)
        return () if entry is None else tuple(entry.served_versions)

    def model_statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        if not name:
            return [counted for entry in self.registry.entries.values() for counted in entry.statistics()]
        if route := self.routes.served.get(name):
            return [arm for arm in route.statistics() if version in ("", arm.version)]
        entry = self.registry.find(name)
        if entry is None or not entry.served_versions:
            raise InvalidArgument(f"requested model '{name}' is not available")
        versions = entry.statistics(version)
        if version and version not in entry.served_versions:
            raise InvalidArgument(f"requested model version is not available for model '{name}'")
        return versions

    @property
    def loads_on_request(self) -> bool:
        return self.model_control is not None

    async def repository_index(self, ready_only: bool = False) -> list[RepositoryIndexEntry]:
        loadable = [] if self.model_control is None else await self.model_control.loadable_models()
        known = [shown for entry in self.registry.entries.values() for shown in entry.index()]
        known += [RepositoryIndexEntry(name) for name in loadable if name not in self.registry.entries]
        return [entry for entry in known if not ready_only or entry.state is ModelState.READY]

    async def load_model(self, name: str, config: str | None = None, files: Mapping[str, bytes] = NO_FILES) -> None:
        if self._exiting:
            raise ServerExiting
        await self.lifecycle.run_to_completion(self._explicit_control().load(name, config, files))

    async def unload_model(self, name: str, dependents: bool = False) -> None:
        await self.lifecycle.run_to_completion(self._explicit_control().unload(name, dependents))

    def adapters(self) -> list[ServedAdapter]:
        return self._adapters.served()

    async def load_adapter(self, name: str, path: str, model: str = "", replace: bool = False) -> Adapter:
        if self._exiting:
            raise ServerExiting
        return await self.lifecycle.run_to_completion(self._adapters.load(name, path, model, replace))

    async def unload_adapter(self, name: str) -> ServedAdapter:
        return await self.lifecycle.run_to_completion(self._adapters.unload(name))

    def release_scope(self, model: str, tenant: str, scope: str) -> None:
        route = self.routes.served.get(model)
        names = {model} if route is None else {target.model for target in route.route.targets}
        if route is None:
            self.registry.find_served(model)
        entries = filter(None, map(self.registry.find, names))
        loaded = [version for entry in entries for version in entry.loaded_versions.values()]
        capabilities = [version.capabilities.retention for version in loaded]
        if loaded and not any(capabilities):
            raise InvalidArgument(f"model '{model}' retains nothing for sessions", field="model")
        for capability in filter(None, capabilities):
            capability.release_scope(tenant, scope)

    def _explicit_control(self) -> ModelControl:
        if self.model_control is None:
            raise Unavailable("explicit model load / unload is not allowed if polling is enabled")
        return self.model_control

    def open_request(self, endpoint: str, headers: Headers = ()) -> RequestContext:
        context = RequestContext(endpoint, headers)
        if self.shared_state.traces.may_trace:  # those that the model makes, too
            context.children = []
        context.on_end(self._on_request_end)
        return context

    async def acquire(self, context: RequestContext, name: str, version: str = "") -> LoadedModelHandle:
        route = self.routes.find(name, version) if name in self.routes.served else None
        arm = None if route is None else route.choose(context)
        context.body = None  # which a long request would hold to its end
        while True:
            try:
                if route is not None:
                    return RoutedModelHandle(self, route, arm, context)
                return LoadedModelHandle(self, self.registry.find_loaded(name, version, context), context)
            except NotResident as missing:
                await self.provide(missing, context)

    def acquire_resident(self, context: RequestContext, name: str, version: str = "") -> LoadedResidentHandle | None:
        """See `core.extension_contracts.ResidentModels`."""
        try:
            loaded = self.registry.find_loaded(name, version, context)
        except NotResident:
            return None
        return LoadedResidentHandle(self, loaded, context)

    def answer_now(
        self, name: str, version: str, request: Callable[[ModelConfig], InferRequest]
    ) -> InferResponse | None:
        """The answer of a model that `find_inline` finds, to a request that `request` makes for its config. None if
        there is no such model, it would refuse the request, or its failure is to be logged: then `acquire` it. Raises
        as `infer`."""
        loaded = None if request_log.log.isEnabledFor(logging.INFO) else self.find_inline(name, version)
        answer = None if loaded is None else loaded.answer_now(request(loaded.config))
        return None if answer is None else answer[0]

    def find_inline(self, name: str, version: str = "") -> LoadedModel | None:
        entry = None if self._exiting or name in self.routes.served else self.registry.entries.get(name)
        served = None if entry is None else entry.find_version(version)
        loaded = None if served is None else served.loaded
        if loaded is None or loaded.capabilities.inline is None:
            return None
        unseen = not (self._observed or self.shared_state.traces.may_trace or request_log.logs_all())
        return loaded if unseen else None

    def check_room(self, context: RequestContext) -> None:
        """See `core.gateway.ModelLookup.check_room`: the model is known without a body where no other writes text."""
        entries = self.registry.entries
        if self.routes.served or len(entries) > _FEW_MODELS:
            return
        latest = [entry.latest for entry in entries.values() if entry.latest is not None]
        loaded = [version.loaded for version in latest if version.loaded is not None]
        texts = [model for model in loaded if model.capabilities.text is not None or model.config.openai_api]
        if len(loaded) == len(latest) and len(texts) == 1 and texts[0].capabilities.queue is not None:
            try:
                texts[0].capabilities.queue.check_room(context.tenant)
            except CharoniaError:
                self.registry.find_loaded(texts[0].config.name, context=context)  # which counts it
                raise

    async def provide(self, missing: NotResident, context: RequestContext) -> None:
        """Load a model that a request is for and that is not in memory; raises `missing` if requests load none, and as
        `OnDemandLoader.provide`."""
        if self.on_demand is None or self._exiting:
            raise missing
        await self.on_demand.provide(missing.name, context.tenant)

    def _on_request_end(self, context: RequestContext) -> None:
        """Count a request that held no model, and call the listeners.

        It counts with the version it was for, or the latest, if that counts; not by any name that a client makes up,
        which would be a series forever.
        """
        if not context.counted:
            entry = self.registry.entries.get(context.model) if context.model_found else None
            version = None if entry is None else entry.versions.get(context.version) or entry.latest
            loaded = None if version is None else version.loaded
            if loaded is not None and loaded.capabilities.measured is not None:
                loaded.capabilities.measured.count(context)
            elif context.end is not None:
                self._ended_without_model[context.end] += 1
        route = self.routes.served.get(context.route) if context.route else None
        if route is not None:
            route.count(context)
        for listener, of_routes in self._end_listeners:
            if context.route or not of_routes:
                listener(context)

    # For the composition root

    def add_end_listener(self, listener: Callable[[RequestContext], None], of_routes: bool = False) -> None:
        """Call it with the context of every request that ends from now on, or with those of routes alone."""
        self._end_listeners.append((listener, of_routes))
        self._observed = self._observed or not of_routes

    def measurements(self) -> Iterator[Measurement]:
        """The readings of each model at a scrape, and of requests that were for none."""
        yield Measurement({}, tuple(ended_readings(self._ended_without_model)))
        for entry in self.registry.entries.values():
            yield from entry.measurements()
        if self._limiter is not None:
            yield from self._limiter.measure()
        if self.on_demand is not None:
            yield self.on_demand.measure()
        for route in self.routes.served.values():
            yield from route.measurements()
        for observer in self.routes.observers:
            yield from observer.measure()
        for held in self._budget.measurements():
            entry = self.registry.get_or_add(held.labels["model"])
            yield held._replace(labels=entry.labels(held.labels["version"]))

    def begin_drain(self) -> None:
        """Be ready no more from here on, so that nobody routes requests here; those that come are answered."""
        self._draining = True

    def begin_exit(self) -> None:
        """Refuse new requests from here on, and cancel the loads and unloads that clients wait for."""
        self._draining = self._exiting = True
        self.lifecycle.cancel_client_changes()
        for observer in self.routes.observers:
            observer.close()
