"""The handles of models that requests have: of a loaded model, or of the arms of a route."""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from functools import partial
from typing import Protocol, TypeVar, cast

from ..core.direct_stream import ReadyResponse, StreamOver
from ..core.errors import InvalidArgument, ServerExiting
from ..core.gateway import ResponseStream
from ..core.model import ModelConfig, ModelStats, TextModel
from ..core.request import GenerateChunk, GenerateRequest, InferRequest, InferResponse, TokenizedPrompt, TokenizeRequest
from ..core.request_context import ExecutionTimes, RequestContext
from ..routing.arm_selector import ArmName
from ..telemetry.request_trace import request_trace, trace_tensors
from ..telemetry.shared_state import SharedState
from .backend_registry import is_composition
from .model_registry import InFlightCounter, LoadedModel, NotResident
from .request_validation import validate_request
from .route_table import ServedRoute

_Item = TypeVar("_Item", InferResponse, GenerateChunk)


class ServingGateway(Protocol):
    """The gateway, as the handles of its models need it."""

    @property
    def shared_state(self) -> SharedState: ...

    @property
    def in_flight(self) -> InFlightCounter:
        """Counts the requests that are being answered."""

    def exiting(self) -> bool: ...

    async def provide(self, missing: NotResident, context: RequestContext) -> None:
        """Load a model that a request is for and that is not in memory, or raise."""


class LoadedModelHandle:
    """A loaded model in use by the request of `context`, at whose end it is released: `core.gateway.ModelHandle`.

    The model's counter has the request from the beginning, so that the model outlives it; the gateway's from the first
    time that the model is asked something.
    """

    __slots__ = ("_adapter", "_context", "_gateway", "_loaded", "_started", "config", "name")

    def __init__(
        self,
        gateway: ServingGateway,
        loaded: LoadedModel,
        context: RequestContext,
        config: ModelConfig | None = None,
    ) -> None:
        self.config = config or loaded.config
        self._gateway = gateway
        self._loaded = loaded
        self._adapter = context.adapter
        self.name = context.adapter or self.config.name
        self._context = context
        self._started = False
        loaded.in_flight.increment()
        context.on_end(self._release)

    @property
    def loaded(self) -> LoadedModel:
        """The model that answers, as far as it is known by now."""
        return self._loaded

    @property
    def needs_full_request(self) -> bool:
        """Whether what is asked of it is needed here as a whole, and so are its answers."""
        return False

    def for_request(self, context: RequestContext) -> "LoadedModelHandle":
        context.model = self.config.name
        context.version = self.config.version
        context.model_found = True
        context.adapter = self._adapter
        return LoadedModelHandle(self._gateway, self._loaded, context)

    def answer_now(self, request: InferRequest) -> tuple[InferResponse, ExecutionTimes] | None:
        return None if self._gateway.exiting() else self._loaded.answer_now(request)

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
        traces = self._gateway.shared_state.traces
        trace = request_trace(context, traces) if traces.samples else None
        ask = partial(loaded.model.infer, request, context)
        responses = ask() if trace is None else trace_tensors(trace, request.inputs.values(), ask)
        if type(responses) is ReadyResponse:
            context.finish()
            return responses
        if loaded.capabilities.text is not None:  # its sequences record how the request ended
            return cast("ResponseStream[InferResponse]", responses)
        return _AnsweredStream(responses, context)

    def generate(self, request: GenerateRequest) -> ResponseStream[GenerateChunk]:
        self._context.id = request.id
        # Models promise an AsyncIterator and write generators; only those can be closed.
        return cast("ResponseStream[GenerateChunk]", self._text_model().generate(request, self._context))

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        tokens = await self._text_model().tokenize(request)
        self._context.finish()
        return tokens

    async def detokenize(self, ids: list[int]) -> str:
        text = await self._text_model().detokenize(ids)
        self._context.finish()
        return text

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
    """A handle of the arm of a route, which answers with the route's name. `arm`: None until `infer` reads the request.

    `infer` also takes the arm where a request's sequence began. `config` is of the arm that answers, from the first
    response on if that has to be loaded.
    """

    __slots__ = ("_arm", "_route")

    def __init__(
        self, gateway: ServingGateway, route: ServedRoute, arm: ArmName | None, context: RequestContext
    ) -> None:
        context.route = route.name
        loaded, config = route.find_any(context) if arm is None else route.find(*arm, context)
        super().__init__(gateway, loaded, context, config)
        self.name = route.name
        self._route, self._arm = route, arm

    @property
    def needs_full_request(self) -> bool:
        return self._arm is None or bool(self._route.observers)

    def for_request(self, context: RequestContext) -> LoadedModelHandle:
        served = self._loaded.config
        context.model = served.name
        context.version = served.version
        context.model_found = True
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


class _AnsweredStream(StreamOver[InferResponse]):
    """The responses of a model as they are: the request is answered with the final one, or at their end."""

    __slots__ = ("_context",)

    def __init__(self, responses: AsyncIterator[InferResponse], context: RequestContext) -> None:
        super().__init__(cast("ResponseStream[InferResponse]", responses))  # models write generators, or the like
        self._context = context

    async def __anext__(self) -> InferResponse:
        try:
            response = await self._items.__anext__()
        except StopAsyncIteration:
            self._context.finish()
            raise
        if response.final:
            self._context.finish()
        return response
