"""The models of the hub as a worker's endpoints have them: handles for requests, the responses to their calls, and
language models whose text is read and written here."""

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from typing import Generic, Self, TypeAlias, TypeVar

import msgspec

from ..core.errors import CharoniaError, InvalidArgument, Unavailable
from ..core.gateway import ResponseStream
from ..core.logprobs import TokenLogprob, TokenPieces
from ..core.model import ModelConfig, ModelStats
from ..core.request import (
    FinishReason,
    GenerateChunk,
    GenerateRequest,
    InferRequest,
    InferResponse,
    TokenizedPrompt,
    TokenizeRequest,
    prompt_media,
)
from ..core.request_context import ExecutionTimes, RequestContext
from ..engine.client.llm import LlmModel
from ..engine.client.media_tensors import MEDIA_NAMES
from ..engine.client.model_media import ModelMedia
from ..repository.request_validation import validate_request
from .hub_connection import HubConnection
from .messages import CancelCall, ModelCall, ResponseNotes, ResponsesRead, SentSequence, TextCall, encode_origin
from .remote_engine import RemoteEngine
from .snapshot import ServedModel
from .state_messages import ReaderDelays

_READY = ModelStats(True)
_HALF_WINDOW = 8
"""Responses of a stream that are read between two words to the hub that more may come."""

ModelFinder: TypeAlias = Callable[[str, str], ServedModel | None]
"""Finds a loaded version of the last snapshot, by its model's name and its own."""

_Item = TypeVar("_Item", InferResponse, GenerateChunk)


class RemoteResponses(Generic[_Item]):
    """The responses to a call that the hub answers: a `ResponseStream`."""

    __slots__ = (
        "_context",
        "_ended",
        "_error",
        "_handle",
        "_hub",
        "_key",
        "_reader",
        "_ready",
        "_text",
        "_unacknowledged",
    )

    def __init__(self, hub: HubConnection, handle: "RemoteModelHandle", key: int) -> None:
        self._hub: HubConnection = hub
        self._handle: RemoteModelHandle = handle
        self._key: int = key
        self._context = handle.context
        self._ready: deque[_Item] = deque()
        self._reader: asyncio.Future[None] | None = None
        self._error: CharoniaError | None = None
        self._ended = False
        self._unacknowledged = 0
        self._text: SentSequence | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> _Item:
        if not self._ready and not self._ended:
            self._reader = asyncio.get_running_loop().create_future()
            await self._reader
        if self._ready:
            response = self._ready.popleft()
            self._unacknowledged += 1
            if self._unacknowledged == _HALF_WINDOW and not self._ended:
                self._unacknowledged = 0
                self._hub.send(ResponsesRead(self._key, _HALF_WINDOW))
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
            self._hub.calls.pop(self._key, None)
            self._hub.send(CancelCall(self._key))

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
        self._hub.calls.pop(self._key, None)
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
                self._text = SentSequence()
                context.all_sequences.append(self._text)
            self._text.prompt = text.prompt
            self._text.generated = text.generated
            self._text.cached = text.cached
            self._text.finish_reason = FinishReason(text.finish_reason) if text.finish_reason else None


class RemoteChunks(RemoteResponses[GenerateChunk]):
    """The chunks of a text that the hub reads, of a model that this process has, too."""

    __slots__ = ("_pieces",)

    def __init__(self, hub: HubConnection, handle: "TextHandle", key: int) -> None:
        super().__init__(hub, handle, key)
        self._pieces = handle.pieces

    def on_item(self, item: GenerateChunk, last: bool, notes: ResponseNotes | None) -> None:
        if item.logprobs or item.prompt_logprobs:
            scored = tuple([self._with_pieces(token) for token in item.logprobs])
            prompt = [
                token if token.given is None else msgspec.structs.replace(token, given=self._with_pieces(token.given))
                for token in item.prompt_logprobs
            ]
            item = msgspec.structs.replace(item, logprobs=scored, prompt_logprobs=tuple(prompt))
        super().on_item(item, last, notes)

    def _with_pieces(self, token: TokenLogprob) -> TokenLogprob:
        return msgspec.structs.replace(token, pieces=self._pieces)


class RemoteModelHandle:
    """A model of tensors, for the request of `context`. `version`: as the request asks for it; `number`: that of
    a loaded one which the hub answers in its event loop, else 0."""

    def __init__(
        self,
        hub: HubConnection,
        find: ModelFinder,
        config: ModelConfig,
        context: RequestContext,
        version: str,
        number: int = 0,
        stats: ModelStats = _READY,
    ) -> None:
        self.config, self.context = config, context
        self._hub, self._find = hub, find
        self._version = version
        self._number = number
        self._stats = stats

    @property
    def name(self) -> str:
        return self.context.adapter or self.config.name

    def for_request(self, context: RequestContext) -> "RemoteModelHandle":
        """The same version for another request, which the hub finds by its own name."""
        mine = self.context
        context.model = mine.model
        context.version = mine.version
        context.model_found = True
        context.adapter, context.route = mine.adapter, mine.route
        return RemoteModelHandle(self._hub, self._find, self.config, context, mine.version, self._number)

    def check_room(self) -> None:
        """Do nothing: the hub refuses."""

    def answer_now(self, request: InferRequest) -> tuple[InferResponse, ExecutionTimes] | None:
        return None

    def stats(self) -> ModelStats:
        return self._stats

    def validate(self, request: InferRequest) -> None:
        validate_request(self.config, request)

    def infer(self, request: InferRequest) -> ResponseStream[InferResponse]:
        context = self.context
        if request.id:
            context.id = request.id
        hub, key = self._hub, self._hub.next_key()
        responses = hub.calls[key] = RemoteResponses[InferResponse](hub, self, key)
        call = ModelCall(
            key,
            hub.key_of(context),
            msgspec.Raw(encode_origin(hub.origin_of(context))),
            context.model,
            self._version,
            request.id,
            [hub.exchange.message(tensor) for tensor in request.inputs.values()],
            request.outputs,
            dict(request.parameters),
            self._number if self._number and self._fits(request) else 0,
        )
        hub.link.gather(call)
        return responses

    def _fits(self, request: InferRequest) -> bool:
        """Whether it fits the config that is known here; checked for the hub, which has less time."""
        try:
            self.validate(request)
        except InvalidArgument:
            return False
        return True

    def generate(self, request: GenerateRequest) -> ResponseStream[GenerateChunk]:
        raise self._no_text()

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        raise self._no_text()

    async def detokenize(self, ids: list[int]) -> str:
        raise self._no_text()

    def on_other_arm(self, model: str, version: str) -> None:
        """The request's sequence began at another arm of its route, which answers."""
        arm = self._find(model, version)
        if arm is not None:
            self.config = replace(arm.config, name=self.config.name, aliases=())

    def _no_text(self) -> InvalidArgument:
        return InvalidArgument(f"model '{self.config.name}' does not generate text", field="model")


class TextHandle(RemoteModelHandle):
    """A language model of the hub whose text becomes tokens here, by `model`."""

    def __init__(
        self,
        hub: HubConnection,
        find: ModelFinder,
        config: ModelConfig,
        context: RequestContext,
        model: LlmModel,
        stats: ModelStats,
    ) -> None:
        super().__init__(hub, find, config, context, context.version, stats=stats)
        self._model = model

    async def tokenize(self, request: TokenizeRequest) -> TokenizedPrompt:
        if prompt_media(request.prompt):  # as in `generate`
            [chunk] = [chunk async for chunk in self._ask_hub(None, request)]
            request = msgspec.structs.replace(request, prompt=chunk.prompt_ids)
        tokens = await self._model.tokenize(request)
        self.context.finish()
        return tokens

    @property
    def pieces(self) -> TokenPieces:
        return self._model.bundle.tokenizer.pieces

    async def detokenize(self, ids: list[int]) -> str:
        text = await self._model.detokenize(ids)
        self.context.finish()
        return text

    def _generate_in_hub(self, request: GenerateRequest) -> ResponseStream[GenerateChunk]:
        """Have the hub answer a request as a whole."""
        self.context.id = request.id
        return self._ask_hub(request)

    def _ask_hub(self, generation: GenerateRequest | None, prompt: TokenizeRequest | None = None) -> RemoteChunks:
        hub, key = self._hub, self._hub.next_key()
        responses = hub.calls[key] = RemoteChunks(hub, self, key)
        hub.send(TextCall(key, hub.key_of(self.context), generation, prompt))
        return responses


class RemoteTextHandle(TextHandle):
    """A language model of the hub, whose text is read and written here by `model`."""

    def check_room(self) -> None:
        self._model.check_room(self.context.tenant)

    def infer(self, request: InferRequest) -> ResponseStream[InferResponse]:
        if request.id:
            self.context.id = request.id
        if self._encodes or MEDIA_NAMES & request.inputs.keys():  # as in `generate`
            return super().infer(request)
        validate_request(self.config, request)
        return self._model.infer(request, self.context)

    @property
    def _encodes(self) -> bool:
        """Whether there is an encoder beside the engine, in the hub, that every request needs."""
        return self.config.transcribes or self._model.info.source_tokens > 0

    def generate(self, request: GenerateRequest) -> ResponseStream[GenerateChunk]:
        elsewhere = self._encodes or request.speech is not None
        if elsewhere or prompt_media(request.prompt):  # the hub has what prepares and encodes them
            return self._generate_in_hub(request)
        self.context.id = request.id
        return self._model.generate(request, self.context)


class ObservedTextHandle(TextHandle):
    """A language model whose requests and answers the hub needs as a whole: those of a route that copies them for a
    shadow, or goes by what is read last. What no engine answers is read here, by `model`."""

    def generate(self, request: GenerateRequest) -> ResponseStream[GenerateChunk]:
        return self._generate_in_hub(request)


class TextModelHere:
    """A language model of the hub while its text is read here: `model`, once it is built. `users`: requests that have
    it; `engine` of none of them."""

    def __init__(self, served: ServedModel, engine: RemoteEngine) -> None:
        assert served.parts is not None
        self.engine = engine
        self.users = 0
        self.dropped = False
        self._served = served
        self._reported = 0, 0.0
        spec = replace(served.parts.spec, connect=lambda on_progress, metrics: engine)
        media = ModelMedia(plain=served.parts.plain)
        self.model = LlmModel(served.config.name, served.config.version, spec, layout=served.parts.layout, media=media)
        self.building = asyncio.create_task(self._build())

    async def _build(self) -> None:
        """Raises `CharoniaError` if its files are not what they were for the hub."""
        config = self._served.config
        await self.model.load()
        if self.model.config.fingerprint != config.fingerprint:
            message = f"the files of model '{config.name}' have changed since it was loaded: load it again"
            raise Unavailable(message)

    def reader_delays(self) -> ReaderDelays:
        """The tokens that its clients left unread since the last call."""
        (tokens, seconds), metrics = self._reported, self.model.metrics
        self._reported = metrics.merged_tokens, metrics.unread.seconds
        return ReaderDelays(self._served.number, self._reported[0] - tokens, self._reported[1] - seconds)

    def release(self, _: object = None) -> None:
        """Count a user less: a request has ended."""
        self.users -= 1
        self._unload_unused()

    def drop(self) -> None:
        """Unload it with the last request that has it: it is served no longer."""
        self.dropped = True
        self._unload_unused()

    def _unload_unused(self) -> None:
        if self.dropped and not self.users:
            self.building.cancel()
            self._unloading = asyncio.create_task(self.model.unload())
