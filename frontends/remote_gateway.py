"""The gateway of a frontend: endpoints ask it as they ask the hub's own, and it asks the hub.

Models of tensors that the last snapshot has are found here; for any other request, a language model's too, the hub is
asked who serves it, and refuses with its own errors. Text is read and written here, by the same `LlmModel` over another
engine.
"""

import asyncio
import logging
import os
import pickle
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import count
from typing import Any, Generic, NamedTuple, Self, TypeVar, cast

from msgspec import Raw

from ..api.http.error_responses import printable
from ..core.adapter import Adapter
from ..core.errors import CharoniaError, InvalidArgument, Unavailable, Unsupported
from ..core.gateway import (
    NO_FILES,
    ChangeableRoutes,
    RepositoryIndexEntry,
    ResponseStream,
    Rollouts,
    ServedAdapter,
)
from ..core.metrics import ModelStatistics
from ..core.model import ModelConfig, ModelStats
from ..core.request import (
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    InferRequest,
    InferResponse,
    SamplingParams,
    TokenizeRequest,
)
from ..core.request_context import DONE, ExecutionTimes, Headers, RequestContext, RequestEnd
from ..engine.frontend.llm import LlmModel
from ..processes.client_shared_memory import SharedMemoryRegion
from ..repository.request_validation import validate_request
from ..telemetry.logging_setup import apply_log_settings
from ..telemetry.request_log import log_request
from ..telemetry.shared_state import SharedState
from .link import FrameLink
from .messages import (
    AcquireCall,
    AcquiredModel,
    CallFailed,
    CancelCall,
    CancelRequests,
    EndedRequests,
    ErrorMessage,
    FromFrontend,
    GrpcAnswer,
    GrpcCall,
    Heartbeat,
    HttpAnswer,
    HttpCall,
    HubSnapshot,
    InferAnswer,
    LoneRequest,
    ModelCall,
    RequestOrigin,
    ResponseNotes,
    ResponsesEnded,
    ResponsesRead,
    SequenceSteps,
    SnapshotTaken,
    StopFrontend,
    TensorsRead,
    TextAnswer,
    TextCall,
    ToFrontend,
    decode_to_frontend,
    encode_origin,
)
from .remote_engine import RemoteEngine, RemoteStreams
from .snapshot import ServedModel, ServedModels
from .tensors import TensorExchange

log = logging.getLogger(__name__)

_READY = ModelStats(True)
_HALF_WINDOW = 8
"""Responses of a stream that are read between two words to the hub that more may come."""


_TELL_SECONDS = 0.01
"""After which the hub hears of requests that ended as it expects, at the latest."""

_ASKED_AS_A_WHOLE = "a frontend lets its hub answer this"


@dataclass(slots=True, eq=False)
class RelayedText:
    """What the language models of the hub have generated for a request's model, as one `SequenceRecord`."""

    prompt: int | None = 0
    generated: int = 0
    cached: int | None = 0
    finish_reason: FinishReason | None = None
    choice: int = 0
    sampling: SamplingParams = field(default_factory=SamplingParams)
    opened: float = 0.0
    submitted: float | None = None
    begun: float | None = None
    first: float | None = None
    last: float | None = None
    end: RequestEnd | None = None


_Item = TypeVar("_Item", InferResponse, GenerateChunk)


class RemoteResponses(Generic[_Item]):
    """The responses to a call that the hub answers: a `ResponseStream`."""

    __slots__ = ("_context", "_ended", "_error", "_gateway", "_handle", "_key", "_reader", "_ready", "_taken", "_text")

    def __init__(self, gateway: "RemoteGateway", handle: "RemoteModelHandle", key: int) -> None:
        self._gateway: RemoteGateway = gateway
        self._handle: RemoteModelHandle = handle
        self._key: int = key
        self._context = handle.context
        self._ready: deque[_Item] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._error: CharoniaError | None = None
        self._ended = False
        self._taken = 0
        self._text: RelayedText | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _Item:
        if not self._ready and not self._ended:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._ready:
            response = self._ready.popleft()
            self._taken += 1
            if self._taken == _HALF_WINDOW and not self._ended:
                self._taken = 0
                self._gateway.send(ResponsesRead(self._key, _HALF_WINDOW))
            if isinstance(response, InferResponse) and response.final:
                self._context.finish()
            return response
        if self._error is not None:
            raise self._error
        self._context.finish()
        raise StopAsyncIteration

    async def aclose(self) -> None:
        if not self._ended:
            self._ended = True
            self._gateway.calls.pop(self._key, None)
            self._gateway.send(CancelCall(self._key))

    def on_item(self, item: _Item, last: bool, notes: ResponseNotes | None) -> None:
        if notes is not None:
            self._note(notes)
        self._ready.append(item)
        if last:
            self.on_end()
        else:
            self._wake()

    def on_end(self, error: CharoniaError | None = None, notes: ResponseNotes | None = None) -> None:
        if notes is not None:
            self._note(notes)
        self._ended, self._error = True, error
        self._gateway.calls.pop(self._key, None)
        self._wake()

    def _wake(self) -> None:
        if self._reader is not None and not self._reader.done():
            self._reader.set_result(None)

    def _note(self, notes: ResponseNotes) -> None:
        context, text = self._context, notes.text
        for warning in notes.warnings:
            context.warn(warning)
        if notes.model and (context.model, context.version) != (notes.model, notes.version):
            context.model, context.version = notes.model, notes.version
            self._handle.on_other_arm(notes.model, notes.version)
        if text is not None:
            if self._text is None:
                self._text = RelayedText()
                context.all_sequences.append(self._text)
            self._text.prompt, self._text.generated, self._text.cached = text.prompt, text.generated, text.cached
            self._text.finish_reason = FinishReason(text.finish_reason) if text.finish_reason else None


class RemoteModelHandle:
    """A model of tensors, for the request of `context`. `version`: as the request asks for it."""

    def __init__(
        self,
        gateway: "RemoteGateway",
        config: ModelConfig,
        context: RequestContext,
        version: str,
        stats: ModelStats = _READY,
    ) -> None:
        self.config, self.context = config, context
        self._gateway, self._version, self._stats = gateway, version, stats

    @property
    def name(self) -> str:
        return self.context.adapter or self.config.name

    def for_request(self, context: RequestContext) -> "RemoteModelHandle":
        """The same version for another request, which the hub finds by its own name."""
        mine = self.context
        context.model, context.version, context.model_found = mine.model, mine.version, True
        context.adapter, context.route = mine.adapter, mine.route
        return RemoteModelHandle(self._gateway, self.config, context, mine.version)

    def infer_inline(self, request: InferRequest) -> tuple[InferResponse, ExecutionTimes] | None:
        return None

    def stats(self) -> ModelStats:
        return self._stats

    def validate(self, request: InferRequest) -> None:
        validate_request(self.config, request)

    def infer(self, request: InferRequest) -> ResponseStream[InferResponse]:
        context = self.context
        if request.id:
            context.id = request.id
        gateway, key = self._gateway, self._gateway.next_key()
        responses = gateway.calls[key] = RemoteResponses[InferResponse](gateway, self, key)
        call = ModelCall(
            key,
            gateway.key_of(context),
            Raw(encode_origin(gateway.origin_of(context))),
            context.model,
            self._version,
            request.id,
            [gateway.exchange.message(each) for each in request.inputs.values()],
            request.outputs,
            dict(request.parameters),
        )
        gateway.send(call)
        return responses

    def generate(self, request: GenerateRequest) -> ResponseStream[GenerateChunk]:
        raise self._no_text()

    async def tokenize(self, request: TokenizeRequest) -> list[int]:
        raise self._no_text()

    async def detokenize(self, ids: list[int]) -> str:
        raise self._no_text()

    def on_other_arm(self, model: str, version: str) -> None:
        """The request's sequence began at another arm of its route, which answers."""
        found = self._gateway.find(model, version)
        if found is not None:
            self.config = replace(found.config, name=self.config.name, aliases=())

    def _no_text(self) -> InvalidArgument:
        return InvalidArgument(f"model '{self.config.name}' does not generate text", field="model")


class RemoteTextHandle(RemoteModelHandle):
    """A language model of the hub, whose text is read and written here by `model`."""

    def __init__(
        self, gateway: "RemoteGateway", config: ModelConfig, context: RequestContext, model: LlmModel, stats: ModelStats
    ) -> None:
        super().__init__(gateway, config, context, context.version, stats)
        self._model = model

    def infer(self, request: InferRequest) -> ResponseStream[InferResponse]:
        if request.id:
            self.context.id = request.id
        validate_request(self.config, request)
        return cast("ResponseStream[InferResponse]", self._model.infer(request, self.context))

    def generate(self, request: GenerateRequest) -> ResponseStream[GenerateChunk]:
        self.context.id = request.id
        return cast("ResponseStream[GenerateChunk]", self._model.generate(request, self.context))

    async def tokenize(self, request: TokenizeRequest) -> list[int]:
        tokens = await self._model.tokenize(request)
        self.context.finish()
        return tokens

    async def detokenize(self, ids: list[int]) -> str:
        text = await self._model.detokenize(ids)
        self.context.finish()
        return text


class FollowedTextHandle(RemoteModelHandle):
    """A language model whose requests and answers the hub needs as a whole: those of a route that copies them for a
    shadow, or goes by what is read last. What no engine answers is read here, by `model`."""

    def __init__(
        self, gateway: "RemoteGateway", config: ModelConfig, context: RequestContext, model: LlmModel, stats: ModelStats
    ) -> None:
        super().__init__(gateway, config, context, context.version, stats)
        self._model = model

    def generate(self, request: GenerateRequest) -> ResponseStream[GenerateChunk]:
        self.context.id = request.id
        gateway, key = self._gateway, self._gateway.next_key()
        responses = gateway.calls[key] = RemoteResponses[GenerateChunk](gateway, self, key)
        gateway.send(TextCall(key, gateway.key_of(self.context), request))
        return responses

    async def tokenize(self, request: TokenizeRequest) -> list[int]:
        tokens = await self._model.tokenize(request)
        self.context.finish()
        return tokens

    async def detokenize(self, ids: list[int]) -> str:
        text = await self._model.detokenize(ids)
        self.context.finish()
        return text


class TextModelHere:
    """A language model of the hub while its text is read here: `model`, once it is built. `users`: requests that have
    it; `engine` of none of them."""

    def __init__(self, served: ServedModel, engine: RemoteEngine) -> None:
        assert served.parts is not None
        self.engine, self.users, self.dropped = engine, 0, False
        self._served = served
        spec = replace(served.parts.spec, connect=lambda on_progress, metrics: engine)
        self.model = LlmModel(served.config.name, served.config.version, spec, layout=served.parts.layout)
        self.building = asyncio.create_task(self._build())

    async def _build(self) -> None:
        """Raises `CharoniaError` if its files are not what they were for the hub."""
        config = self._served.config
        await self.model.load()
        if self.model.config.fingerprint != config.fingerprint:
            message = f"the files of model '{config.name}' have changed since it was loaded: load it again"
            raise Unavailable(message)

    def release(self, _: object = None) -> None:
        """A request that had it has ended."""
        self.users -= 1
        self._unload_unused()

    def drop(self) -> None:
        """It is served no longer; the requests that have it end with it."""
        self.dropped = True
        self._unload_unused()

    def _unload_unused(self) -> None:
        if self.dropped and not self.users:
            self.building.cancel()
            self._unloading = asyncio.create_task(self.model.unload())


class AcquiredHere(NamedTuple):
    """What the hub has acquired for a request; `text`: the language model here, with one user more."""

    answer: AcquiredModel
    config: ModelConfig
    text: TextModelHere | None

    def give_back(self) -> None:
        """Nobody is there to use it."""
        if self.text is not None:
            self.text.release()


class RemoteGateway:
    """The gateway of one frontend, and its end of the link. `shared_state` mirrors the hub's. `stop_requested`: the hub
    wants this process to end; `stop_by_force`: at once; `lost`: the hub is gone. `told`: there was a first snapshot.
    `files`: of the shared memory of this end, and of the hub's; closed here."""

    def __init__(self, shared_state: SharedState, files: tuple[int, int], max_silence: float) -> None:
        self.shared_state = shared_state
        self.calls: dict[int, RemoteResponses[Any]] = {}
        self.stop_requested, self.lost, self.told = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self.stop_by_force = False
        self.link: FrameLink[FromFrontend, ToFrontend]
        self.link = FrameLink(decode_to_frontend, self._receive, self.lost.set, self._on_unsendable)
        self.link.before_flush = self._before_flush
        self.exchange = TensorExchange(*files, self.link.schedule_from_any_thread)
        for file in files:
            os.close(file)
        self.send = self.link.send
        self.next_key = count(1).__next__
        self._max_silence = max_silence
        self._heard = time.monotonic()
        self._snapshot: HubSnapshot | None = None
        self._served = ServedModels()
        self._by_name: dict[str, dict[str, ServedModel]] = {}
        self._texts: dict[int, TextModelHere] = {}
        self._streams = RemoteStreams()
        self._keys: dict[RequestContext, int] = {}
        self._answered: list[int] = []
        self._ended_otherwise: list[tuple[int, RequestEnd, str]] = []
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._telling: asyncio.TimerHandle | None = None
        self._handlers: Mapping[type, Callable[[Any], None]] = {
            InferAnswer: self._on_answer,
            TextAnswer: self._on_text,
            TensorsRead: lambda message: self.exchange.on_released(message.offsets),
            ResponsesEnded: self._on_responses_ended,
            AcquiredModel: self._on_acquired,
            CallFailed: self._on_failed,
            SequenceSteps: self._streams.on_steps,
            CancelRequests: self._on_cancel_requests,
            HttpAnswer: self._on_reply,
            GrpcAnswer: self._on_reply,
            HubSnapshot: self._on_snapshot,
            Heartbeat: self._on_heartbeat,
            StopFrontend: self._on_stop,
        }

    # For endpoints

    def open_request(self, endpoint: str, headers: Headers = ()) -> RequestContext:
        context = RequestContext(endpoint, headers)
        context.on_end(self._on_request_end)
        return context

    async def acquire(self, context: RequestContext, name: str, version: str = "") -> RemoteModelHandle:
        versions = self._by_name.get(name)
        found = None if versions is None else versions.get(version)
        if found is not None and found.parts is None:
            config, context.body = found.config, None
            context.model, context.version, context.model_found = config.name, config.version, True
            return RemoteModelHandle(self, config, context, version)
        context.model, context.version = name, version
        key = self.key_of(context)
        call = AcquireCall(key, self.origin_of(context), printable(name), version, self._body_of(context))
        acquired: AcquiredHere = await self._ask(key, call)
        context.body, answer, text = None, acquired.answer, acquired.text
        if text is not None:
            context.on_end(text.release)
        context.model, context.version, context.model_found = answer.model, answer.version, True
        context.adapter, context.route = answer.adapter, answer.route
        used, capacity = answer.kv_tokens
        stats = ModelStats(True, kv_tokens=used, kv_token_capacity=capacity)
        if text is None:
            return RemoteModelHandle(self, acquired.config, context, answer.version, stats)
        await asyncio.shield(text.building)
        if answer.follows:
            context.logged = True
            return FollowedTextHandle(self, acquired.config, context, text.model, stats)
        model = text.model.over(text.engine.for_request(key))
        return RemoteTextHandle(self, acquired.config, context, model, stats)

    def _body_of(self, context: RequestContext) -> dict[str, Any] | None:
        asked = self._snapshot is not None and self._snapshot.has_routes and context.body is not None
        return dict(context.body) if asked and context.body is not None else None

    def ready(self) -> bool:
        silence = time.monotonic() - self._heard
        return self._snapshot is not None and self._snapshot.ready and silence < self._max_silence

    def exiting(self) -> bool:
        return self._snapshot is not None and self._snapshot.exiting

    def model_configs(self) -> list[ModelConfig]:
        return list(self._served.listed)

    # For handles

    def find(self, model: str, version: str) -> ServedModel | None:
        """The loaded version of the last snapshot."""
        return self._by_name.get(model, {}).get(version)

    def key_of(self, context: RequestContext) -> int:
        """The key by which the hub knows a request, or will."""
        key = self._keys.get(context)
        if key is None:
            key = self._keys[context] = self.next_key()
        return key

    def origin_of(self, context: RequestContext) -> RequestOrigin:
        return RequestOrigin.of(context, self._snapshot is not None and self._snapshot.has_routes)

    # What the hub answers as a whole

    async def ask_http(self, call: Callable[[int], HttpCall]) -> HttpAnswer:
        """The hub's answer to a request; `call` makes the message with a key."""
        key = self.next_key()
        answer: HttpAnswer = await self._ask(key, call(key))
        return answer

    async def ask_grpc(self, rpc: str, message: bytes) -> Mapping[str, Any]:
        """The fields of the hub's response to a control RPC. Raises `CharoniaError`."""
        key = self.next_key()
        answer: GrpcAnswer = await self._ask(key, GrpcCall(key, rpc, message))
        return answer.fields

    async def _ask(self, key: int, message: FromFrontend) -> Any:
        """The answer to a call, which ends with the task that waits for it. Raises the error that the hub tells."""
        waiting = self._waiting[key] = asyncio.get_running_loop().create_future()
        self.send(message)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled() and isinstance(found := waiting.result(), AcquiredHere):
                found.give_back()
            self.send(CancelCall(key))
            raise
        finally:
            del self._waiting[key]

    # Messages

    def _receive(self, message: ToFrontend) -> None:
        self._handlers[type(message)](message)

    def _on_answer(self, message: InferAnswer) -> None:
        responses = self.calls.get(message.key)
        if responses is None:
            self.exchange.discard(message.outputs)
            return
        outputs = tuple([self.exchange.tensor(each) for each in message.outputs])
        response = InferResponse(outputs, message.parameters, message.final)
        responses.on_item(response, message.last, message.notes)

    def _on_text(self, message: TextAnswer) -> None:
        responses = self.calls.get(message.key)
        if responses is not None:
            responses.on_item(message.chunk, False, message.notes)

    def _on_responses_ended(self, message: ResponsesEnded) -> None:
        responses = self.calls.get(message.key)
        if responses is not None:
            responses.on_end()

    def _on_acquired(self, message: AcquiredModel) -> None:
        """Looked up at once: the next snapshot may not have it any more."""
        waiting = self._waiting.get(message.key)
        if waiting is None or waiting.done():
            return
        text, config = self._texts.get(message.number), message.config
        known = next((model.config for model in self._served.models if model.number == message.number), None)
        if text is not None:
            text.users += 1
        served = _unpickled_config(config) if config or known is None else known
        waiting.set_result(AcquiredHere(message, served, text))

    def _on_reply(self, message: HttpAnswer | GrpcAnswer) -> None:
        waiting = self._waiting.get(message.key)
        if waiting is not None and not waiting.done():
            waiting.set_result(message)

    def _on_failed(self, message: CallFailed) -> None:
        error, responses, waiting = message.error.error(), self.calls.get(message.key), self._waiting.get(message.key)
        if responses is not None:
            responses.on_end(error, message.notes)
        elif waiting is not None and not waiting.done():
            waiting.set_exception(error)

    def _on_unsendable(self, message: FromFrontend, error: Exception) -> None:
        refusal = InvalidArgument(f"the request cannot be understood: {error}")
        if isinstance(message, ModelCall):
            self.exchange.take_back(message.inputs)
        if (key := getattr(message, "key", None)) is not None:
            self._on_failed(CallFailed(key, ErrorMessage.of(refusal)))

    def _on_cancel_requests(self, message: CancelRequests) -> None:
        text = self._texts.get(message.model)
        if text is not None:
            text.model.cancel_here(message.request_id)

    def _on_heartbeat(self, message: Heartbeat) -> None:
        self._heard = time.monotonic()

    def _on_stop(self, message: StopFrontend) -> None:
        self.stop_by_force = message.force
        self.stop_requested.set()

    def _on_snapshot(self, snapshot: HubSnapshot) -> None:
        before, self._snapshot, self._heard = self._snapshot, snapshot, time.monotonic()
        if before is None or snapshot.models != before.models:
            self._serve(ServedModels.of_pickle(snapshot.models))
        if before is None or snapshot.logs != before.logs:
            apply_log_settings(snapshot.logs.settings())
        self._mirror_regions(snapshot.regions)
        self.told.set()
        building = [text.building for text in self._texts.values() if not text.building.done()]
        asyncio.gather(*building, return_exceptions=True).add_done_callback(
            lambda _: self.send(SnapshotTaken(snapshot.number))
        )

    def _serve(self, served: ServedModels) -> None:
        by_name: dict[str, dict[str, ServedModel]] = {}
        for model in served.models:
            for name in model.names:
                versions = by_name.setdefault(name, {})
                versions[model.config.version] = model
                if model.latest:
                    versions[""] = model
        self._served, self._by_name = served, by_name
        texts = {model.number: model for model in served.models if model.parts is not None}
        for number in [number for number in self._texts if number not in texts]:
            self._texts.pop(number).drop()
        for number, model in texts.items():
            if number not in self._texts:
                assert model.parts is not None
                engine = RemoteEngine(self, self._streams, number, model.parts.info)
                self._texts[number] = text = TextModelHere(model, engine)
                text.building.add_done_callback(partial(_report, model.config.name))

    def _mirror_regions(self, regions: list[SharedMemoryRegion]) -> None:
        mirror = self.shared_state.shared_memory
        known = {region.name: region for region in mirror.registered()}
        wanted = {region.name: region for region in regions}
        for name in [name for name, region in known.items() if wanted.get(name) != region]:
            mirror.unregister(name)
        for name, region in wanted.items():
            if known.get(name) != region:
                try:
                    mirror.register(*region)
                except CharoniaError as error:
                    log.error("shared memory region '%s' cannot be used here: %s", name, error.message)

    # The ends of requests

    def _on_request_end(self, context: RequestContext) -> None:
        key, end = self._keys.pop(context, None), context.end
        assert end is not None
        if key is None:
            model, version = printable(context.model), printable(context.version)
            self.send(LoneRequest(self.origin_of(context), model, version, context.model_found, end))
        elif end == DONE:
            self._answered.append(key)
            if context.route or (self._snapshot is not None and self._snapshot.has_traces):
                self.link.schedule()
            elif self._telling is None:  # with the next call, most likely
                self._telling = asyncio.get_running_loop().call_later(_TELL_SECONDS, self.link.schedule)
        else:
            self._ended_otherwise.append((key, end, context.id))
            self.link.schedule()
        log_request(context)

    def _before_flush(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        if self._answered or self._ended_otherwise:
            self.send(EndedRequests(self._answered, self._ended_otherwise))
            self._answered, self._ended_otherwise = [], []
        if released := self.exchange.released():
            self.send(TensorsRead(released))

    # What frontends never ask by themselves: `ask_http` and `ask_grpc` do

    @property
    def route_control(self) -> ChangeableRoutes:
        raise Unsupported(_ASKED_AS_A_WHOLE)

    @property
    def rollouts(self) -> Rollouts:
        raise Unsupported(_ASKED_AS_A_WHOLE)

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        raise Unsupported(_ASKED_AS_A_WHOLE)

    def served_versions(self, name: str) -> tuple[str, ...]:
        raise Unsupported(_ASKED_AS_A_WHOLE)

    def model_statistics(self, name: str = "", version: str = "") -> list[ModelStatistics]:
        raise Unsupported(_ASKED_AS_A_WHOLE)

    def is_model_ready(self, name: str, version: str = "") -> bool:
        raise Unsupported(_ASKED_AS_A_WHOLE)

    async def unready_reason(self, name: str, version: str = "") -> str:
        raise Unsupported(_ASKED_AS_A_WHOLE)

    def repository_index(self, ready_only: bool = False) -> list[RepositoryIndexEntry]:
        raise Unsupported(_ASKED_AS_A_WHOLE)

    async def load_model(self, name: str, config: str | None = None, files: Mapping[str, bytes] = NO_FILES) -> None:
        raise Unsupported(_ASKED_AS_A_WHOLE)

    async def unload_model(self, name: str, dependents: bool = False) -> None:
        raise Unsupported(_ASKED_AS_A_WHOLE)

    def adapters(self) -> list[ServedAdapter]:
        raise Unsupported(_ASKED_AS_A_WHOLE)

    async def load_adapter(self, name: str, path: str, model: str = "", replace: bool = False) -> Adapter:
        raise Unsupported(_ASKED_AS_A_WHOLE)

    async def unload_adapter(self, name: str) -> ServedAdapter:
        raise Unsupported(_ASKED_AS_A_WHOLE)


def _report(name: str, building: "asyncio.Task[None]") -> None:
    if not building.cancelled() and (error := building.exception()) is not None:
        log.error("model '%s' cannot be read: %s", name, error)


@lru_cache(64)
def _unpickled_config(data: bytes) -> ModelConfig:
    config = pickle.loads(data)
    assert isinstance(config, ModelConfig)
    return config
