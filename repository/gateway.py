"""The gateway in process, and the handles that requests have of models: all live in one event loop.

Knows nothing of protocols, and of models only the contract.
"""

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Self, TypeVar, cast

from ..core.adapter import Adapter
from ..core.errors import CharoniaError, InvalidArgument, ServerExiting, Unavailable
from ..core.gateway import NO_FILES, ModelState, RepositoryIndexEntry, ResponseStream, ServedAdapter
from ..core.metrics import Measurement, ModelStatistics
from ..core.model import ModelConfig, ModelStats, TextModel
from ..core.request import GenerateChunk, GenerateRequest, InferRequest, InferResponse, TokenizeRequest
from ..core.request_context import DONE, ExecutionTimes, Headers, RequestContext, RequestEnd, end_for_error
from ..routing.arm_selector import ArmName
from ..telemetry.llm_metrics import ended_readings
from ..telemetry.request_log import log_request
from ..telemetry.request_trace import request_trace, trace_tensors
from ..telemetry.shared_state import SharedState
from .adapter_control import AdapterControl
from .backend_registry import is_composition
from .builder import ModelBuilder
from .catalog import RepositoryCatalog
from .lifecycle import ModelLifecycle
from .model_control import ModelControl
from .model_registry import InFlightCounter, LoadedModel, ModelRegistry, ModelVersion, NotResident
from .on_demand import OnDemandLoader
from .request_validation import validate_request
from .route_control import RouteControl
from .route_table import RouteTable, ServedRoute

_Item = TypeVar("_Item", InferResponse, GenerateChunk)

_FEW_MODELS = 32
"""So many are looked at before a body that names one is read."""


class LoadedModelHandle:
    """A loaded model in use by the request of `context`, at whose end it is released: `core.gateway.ModelHandle`.

    The model's counter has the request from the beginning, so that the model outlives it; the gateway's from the first
    time that the model is asked something.
    """

    __slots__ = ("_adapter", "_context", "_gateway", "_loaded", "_started", "config")

    def __init__(
        self,
        gateway: "InProcessGateway",
        loaded: LoadedModel,
        context: RequestContext,
        config: ModelConfig | None = None,
    ) -> None:
        self.config = config or loaded.config
        self._gateway = gateway
        self._loaded = loaded
        self._adapter = context.adapter
        self._context = context
        self._started = False
        loaded.in_flight.increment()
        context.on_end(self._release)

    @property
    def name(self) -> str:
        return self._adapter or self.config.name

    @property
    def loaded(self) -> LoadedModel:
        """The model that answers, as far as it is known by now."""
        return self._loaded

    @property
    def needs_full_request(self) -> bool:
        """Whether what is asked of it is needed here as a whole, and so are its answers."""
        return False

    def for_request(self, context: RequestContext) -> "LoadedModelHandle":
        context.model, context.version, context.model_found = self.config.name, self.config.version, True
        context.adapter = self._adapter
        return LoadedModelHandle(self._gateway, self._loaded, context)

    def answer_now(self, request: InferRequest) -> tuple[InferResponse, ExecutionTimes] | None:
        inline = self._loaded.capabilities.inline
        if inline is None or self._gateway.exiting():
            return None
        try:
            validate_request(self.config, request)
        except InvalidArgument:
            return None
        try:
            answer = inline.answer_now(request)
        except Exception as error:
            inline.count_end(end_for_error(error, submitted=False))
            raise
        if answer is not None:
            inline.count_end(DONE)
        return answer

    def check_room(self) -> None:
        if self._loaded.capabilities.queue is not None:
            self._loaded.capabilities.queue.check_room(self._context.tenant)

    def stats(self) -> ModelStats:
        return self._loaded.model.stats()

    def validate(self, request: InferRequest) -> None:
        validate_request(self.config, request)

    def infer(self, request: InferRequest) -> ResponseStream[InferResponse]:
        loaded, context = self._loaded, self._context
        if request.id:
            context.id = request.id
        self.start()
        validate_request(self.config, request)
        responses = loaded.model.infer(request, context)
        trace = request_trace(context, self._gateway.shared_state.traces)
        responses = trace_tensors(trace, request.inputs.values(), responses)
        if loaded.capabilities.text is not None:  # its sequences record how the request ended
            return cast("ResponseStream[InferResponse]", responses)
        return _AnsweredStream(responses, context)

    def generate(self, request: GenerateRequest) -> ResponseStream[GenerateChunk]:
        self._context.id = request.id
        # Models promise an AsyncIterator and write generators; only those can be closed.
        return cast("ResponseStream[GenerateChunk]", self._text_model().generate(request, self._context))

    async def tokenize(self, request: TokenizeRequest) -> list[int]:
        tokens = await self._text_model().tokenize(request)
        self._context.finish()
        return tokens

    async def detokenize(self, ids: list[int]) -> str:
        text = await self._text_model().detokenize(ids)
        self._context.finish()
        return text

    async def token_strings(self, ids: list[int]) -> list[str]:
        return await self._text_model().token_strings(ids)

    def _text_model(self) -> TextModel:
        self.start()
        if self._loaded.capabilities.text is None:
            raise InvalidArgument(f"model '{self.config.name}' does not generate text", field="model")
        return self._loaded.capabilities.text

    def start(self) -> None:
        """Count the request among those that are being answered. Raises `ServerExiting`."""
        if self._gateway.exiting():
            raise ServerExiting
        if not self._started:
            self._started = True
            self._gateway.in_flight.increment()

    def _release(self, context: RequestContext) -> None:
        if self._loaded.capabilities.measured is not None and not context.counted:
            context.counted = True
            self._loaded.capabilities.measured.count(context)
        self._loaded.in_flight.decrement()
        if self._started:
            self._gateway.in_flight.decrement()


class RoutedModelHandle(LoadedModelHandle):
    """A handle of the arm of a route, which answers with the route's name. `arm`: None if the request tells.

    `infer` learns that, and whether the request is of a sequence, and takes the arm where that began: `config` is of
    the arm that answers from then on, or from the first response on if the arm has to be loaded.
    """

    __slots__ = ("_arm", "_route")

    def __init__(
        self, gateway: "InProcessGateway", route: ServedRoute, arm: ArmName | None, context: RequestContext
    ) -> None:
        context.route = route.name
        loaded, config = route.find_any(context) if arm is None else route.find(*arm, context)
        super().__init__(gateway, loaded, context, config)
        self._route, self._arm = route, arm

    @property
    def name(self) -> str:
        return self._route.name

    @property
    def needs_full_request(self) -> bool:
        return self._arm is None or bool(self._route.observers)

    def for_request(self, context: RequestContext) -> LoadedModelHandle:
        served = self._loaded.config
        context.model, context.version, context.model_found = served.name, served.version, True
        context.adapter, context.route = self._adapter, self._route.name
        if self._arm is None:
            return RoutedModelHandle(self._gateway, self._route, None, context)
        return LoadedModelHandle(self._gateway, self._loaded, context, self.config)

    def check_room(self) -> None:
        if self._arm is not None:
            super().check_room()

    def answer_now(self, request: InferRequest) -> tuple[InferResponse, ExecutionTimes] | None:
        return None if self._arm is None else super().answer_now(request)

    def infer(self, request: InferRequest) -> ResponseStream[InferResponse]:
        if self._arm is None or request.parameters.get("sequence_id"):
            try:
                self._take_arm(request)
            except NotResident as missing:
                return self._observed(request, self._infer_when_loaded(request, missing))
        return self._observed(request, super().infer(request))

    def generate(self, request: GenerateRequest) -> ResponseStream[GenerateChunk]:
        return self._observed(request, super().generate(request))

    def _observed(
        self, request: InferRequest | GenerateRequest, responses: ResponseStream[_Item]
    ) -> ResponseStream[_Item]:
        for observer in self._route.observers:
            responses = observer.follow(request, self._context, responses)
        return responses

    def _take_arm(self, request: InferRequest) -> None:
        """Hold the arm that serves this request. Raises as `ServedRoute.find`; it may then be called again."""
        context = self._context
        if self._arm is None:
            self._arm = self._route.choose_for(request, context)
        if correlation_id := request.parameters.get("sequence_id"):
            end = bool(request.parameters.get("sequence_end"))
            loaded, config = self._route.find_for_sequence(correlation_id, end, self._arm, context)
        else:
            loaded, config = self._route.find(*self._arm, context)
        loaded.in_flight.increment()
        self._loaded.in_flight.decrement()
        self._loaded, self.config = loaded, config

    def _text_model(self) -> TextModel:
        if self._arm is None:  # a model asks, which has no body
            self._take_arm(InferRequest())
        return super()._text_model()

    async def _infer_when_loaded(
        self, request: InferRequest, missing: NotResident
    ) -> AsyncGenerator[InferResponse, None]:
        while True:
            self._loaded.in_flight.decrement()  # it may have to make room
            try:
                await self._gateway.provide(missing, self._context)
            finally:
                self._loaded.in_flight.increment()
            try:
                self._take_arm(request)
                break
            except NotResident as other:
                missing = other
        async with aclosing(super().infer(request)) as responses:
            async for response in responses:
                yield response


class LoadedResidentHandle(LoadedModelHandle):
    """A loaded model in use by a request that no client waits for: `core.extension_contracts.ResidentHandle`. Nothing
    is traced, and the server's end does not wait for it."""

    __slots__ = ()

    @property
    def generates_text(self) -> bool:
        return self._loaded.capabilities.text is not None

    @property
    def asks_models(self) -> bool:
        return is_composition(self.config.backend)

    def infer(self, request: InferRequest) -> ResponseStream[InferResponse]:
        validate_request(self.config, request)
        return cast("ResponseStream[InferResponse]", self._loaded.model.infer(request, self._context))

    def start(self) -> None:
        """It counts for nobody."""


class _AnsweredStream:
    """The responses of a model as they are: the request is answered with the final one, or at their end. An async
    generator would take 4 % of the CPU time of a small request over HTTP."""

    __slots__ = ("_context", "_responses")

    def __init__(self, responses: AsyncIterator[InferResponse], context: RequestContext) -> None:
        self._responses = cast("ResponseStream[InferResponse]", responses)  # models write generators, or the like
        self._context = context

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> InferResponse:
        try:
            response = await self._responses.__anext__()
        except StopAsyncIteration:
            self._context.finish()
            raise
        if response.final:
            self._context.finish()
        return response

    async def aclose(self) -> None:
        await self._responses.aclose()


class InProcessGateway:
    """The models of the server, and the requests to them.

    With `strict`, the server is ready when its registry is, else at once; nothing is ready while the process is not
    `healthy`. Each of `end_listeners` is called with the context of every request that ended. `model_control` is set in
    mode explicit, `on_demand` where requests load models, `route_control` where there are repositories;
    `in_flight` counts the requests that are being answered.
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
        self.on_demand: OnDemandLoader | None = None
        self.in_flight = InFlightCounter()
        self._strict = strict
        self._healthy = healthy
        self._end_listeners = [*end_listeners]
        self._budget, self._limiter = builder.budget, builder.limiter
        self._ended_without_model: Counter[RequestEnd] = Counter()
        self._exiting = False

    # For endpoints

    def alive(self) -> bool:
        return True

    def ready(self) -> bool:
        if self._exiting or not self._healthy():
            return False
        return not self._strict or self.registry.ready

    def exiting(self) -> bool:
        return self._exiting

    def requests_in_flight(self) -> int:
        return self.in_flight.count

    async def tokenizer_info(self, name: str) -> dict[str, Any]:
        route = self.routes.find(name, "")
        loaded = (
            next(filter(None, route.loaded()), None) if route is not None else self.registry.find_served(name).loaded
        )
        if loaded is None or loaded.capabilities.text is None:
            raise InvalidArgument(f"model '{name}' has no tokenizer to tell of", field="model")
        return await loaded.capabilities.text.tokenizer_info()

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
        found: ServedRoute | ModelVersion | None = None if version else self.routes.served.get(name)
        entry = None if found else self.registry.find(name)
        if entry is not None:
            found = entry.find_version(version)
        return not self._exiting and self._healthy() and found is not None and found.ready

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
            return [each for entry in self.registry.entries.values() for each in entry.statistics()]
        if route := self.routes.served.get(name):
            return [each for each in route.statistics() if version in ("", each.version)]
        entry = self.registry.find(name)
        if entry is None or not entry.served_versions:
            raise InvalidArgument(f"requested model '{name}' is not available")
        found = entry.statistics(version)
        if version and version not in entry.served_versions:
            raise InvalidArgument(f"requested model version is not available for model '{name}'")
        return found

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

    def _explicit_control(self) -> ModelControl:
        if self.model_control is None:
            raise Unavailable("explicit model load / unload is not allowed if polling is enabled")
        return self.model_control

    def open_request(self, endpoint: str, headers: Headers = ()) -> RequestContext:
        context = RequestContext(endpoint, headers)
        context.children = [] if self.shared_state.traces.wants_children else None
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

    def check_room(self, context: RequestContext) -> None:
        """See `core.gateway.ModelLookup.check_room`: the model is known without a body where no other writes text."""
        entries = self.registry.entries
        if self.routes.served or len(entries) > _FEW_MODELS:
            return
        latest = [entry.latest for entry in entries.values() if entry.latest is not None]
        loaded = [version.loaded for version in latest if version.loaded is not None]
        texts = [each for each in loaded if each.capabilities.text is not None or each.config.openai_api]
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
        for listener in self._end_listeners:
            listener(context)

    # For the composition root

    def add_end_listener(self, listener: Callable[[RequestContext], None]) -> None:
        """Call it with the context of every request that ends from now on."""
        self._end_listeners.append(listener)

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

    def begin_exit(self) -> None:
        """Refuse new requests from here on, and cancel the loads and unloads that clients wait for."""
        self._exiting = True
        self.lifecycle.cancel_client_changes()
        for observer in self.routes.observers:
            observer.close()
