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
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache, partial
from itertools import count
from typing import Any, NamedTuple, TypeAlias

from ..api.http.error_responses import printable
from ..core.errors import CharoniaError, InvalidArgument, NotFound
from ..core.model import ModelConfig, ModelStats
from ..core.request import InferResponse
from ..core.request_context import DONE, Headers, RequestContext, RequestEnd
from ..telemetry.logging_setup import apply_log_settings
from ..telemetry.loop_lag import LoopLag
from ..telemetry.request_log import log_request
from ..telemetry.shared_state import SharedState
from .link import FrameLink
from .messages import (
    BEAT_SECONDS,
    HUNG_SECONDS,
    AcquireCall,
    AcquiredModel,
    CallFailed,
    CancelCall,
    CancelRequests,
    EndedRequests,
    FromFrontend,
    FrontendState,
    GrpcAnswer,
    GrpcCall,
    Heartbeat,
    HttpAnswer,
    HttpCall,
    HttpPiece,
    HubSnapshot,
    LoneRequest,
    ModelAnswer,
    ModelCall,
    PieceWanted,
    RequestOrigin,
    ResponsesEnded,
    SentError,
    SentSequence,
    SequenceSteps,
    SnapshotTaken,
    StopFrontend,
    TensorsRead,
    TextAnswer,
    ToFrontend,
    decode_to_frontend,
)
from .remote_engine import RemoteEngine, RemoteStreams
from .remote_models import ObservedTextHandle, RemoteModelHandle, RemoteResponses, RemoteTextHandle, TextModelHere
from .snapshot import ServedModel, ServedModels
from .tensors import TensorExchange

log = logging.getLogger(__name__)

_TELL_SECONDS = 0.01
"""After which the hub hears of requests that ended as it expects, at the latest."""

PieceMessage: TypeAlias = HttpAnswer | HttpPiece | PieceWanted | CallFailed


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
    """The gateway of one frontend, and its end of the link. `shared_state` mirrors the hub's, which logs requests where
    it sends spans. `stop_requested`: the hub wants this process to end; `stop_by_force`: at once; `lost`: the hub is
    gone. `told`: there was a first snapshot. `files`: of the shared memory of this end, and of the hub's; closed here.
    `max_silence`: seconds that a word of the hub may be overdue before nothing is ready; `lag`: of this process's
    loop."""

    def __init__(self, shared_state: SharedState, files: tuple[int, int], max_silence: float, lag: LoopLag) -> None:
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
        self._max_silence, self._lag = max_silence, lag
        self._heard = time.monotonic()
        self._snapshot: HubSnapshot | None = None
        self._served = ServedModels()
        self._by_name: dict[str, dict[str, ServedModel]] = {}
        self._texts: dict[int, TextModelHere] = {}
        self._streams = RemoteStreams()
        self._keys: dict[RequestContext, int] = {}
        self._answered: list[int] = []
        self._ended_otherwise: list[tuple[int, RequestEnd, str]] = []
        self._hub_logs = self._wants_headers = shared_state.traces.sends_spans
        self._sequences: list[tuple[int, list[SentSequence]]] = []
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._arriving: dict[int, asyncio.Queue[PieceMessage]] = {}
        self._telling: asyncio.TimerHandle | None = None
        self._opening_regions = asyncio.Lock()
        self._handlers: Mapping[type, Callable[[Any], None]] = {
            ModelAnswer: self._on_answer,
            TextAnswer: self._on_text,
            TensorsRead: lambda message: self.exchange.on_released(message.offsets),
            ResponsesEnded: self._on_responses_ended,
            AcquiredModel: self._on_acquired,
            CallFailed: self._on_failed,
            SequenceSteps: self._streams.on_steps,
            CancelRequests: self._on_cancel_requests,
            HttpAnswer: self._on_reply,
            HttpPiece: self._on_piece,
            PieceWanted: self._on_piece,
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
            return RemoteModelHandle(self, config, context, version, found.number if found.inline else 0)
        context.model, context.version = name, version
        # A name that the snapshot has is that of no route: only those go by bodies.
        body = context.body if found is None and self._snapshot is not None and self._snapshot.has_routes else None
        key, counts = self.key_of(context), (context.prompt_count, context.choice_count)
        call = AcquireCall(key, self.origin_of(context), printable(name), version, *counts, body)
        acquired: AcquiredHere = await self._ask(key, call)
        context.body, answer, text = None, acquired.answer, acquired.text
        if text is not None:
            context.on_end(text.release)
        context.model, context.version, context.model_found = answer.model, answer.version, True
        context.adapter, context.route = answer.adapter, answer.route
        used, capacity = answer.kv_tokens
        stats = ModelStats(True, kv_tokens=used, kv_token_capacity=capacity)
        if text is None:
            return RemoteModelHandle(self, acquired.config, context, answer.version, stats=stats)
        await asyncio.shield(text.building)
        if answer.follows:
            context.logged = True
            return ObservedTextHandle(self, acquired.config, context, text.model, stats)
        model = text.model.with_engine(text.engine.for_request(key, answer.refusal))
        return RemoteTextHandle(self, acquired.config, context, model, stats)

    def check_room(self, context: RequestContext) -> None:
        """The hub knows, and is asked with the body."""

    def alive(self) -> bool:
        return self._silence < HUNG_SECONDS

    def ready(self) -> bool:
        return self._snapshot is not None and self._snapshot.ready and self._heard_lately and not self._lag.stuck

    @property
    def _heard_lately(self) -> bool:
        return self._silence < self._max_silence

    @property
    def _silence(self) -> float:
        """Seconds for which a word of the hub is overdue."""
        return time.monotonic() - self._heard - BEAT_SECONDS

    def exiting(self) -> bool:
        return self._snapshot is not None and self._snapshot.exiting

    def model_configs(self) -> list[ModelConfig]:
        return list(self._served.listed)

    def model_config(self, name: str, version: str = "") -> ModelConfig:
        if (model := self.find(name, version)) is not None:
            return model.config
        for config in self._served.listed:  # routes, and models that requests load
            if name in (config.name, *config.aliases) and version in ("", config.version):
                return config
        raise NotFound(f"Request for unknown model: '{name}' is not found")

    def served_versions(self, name: str) -> tuple[str, ...]:
        versions = set(self._by_name.get(name, ())) - {""} or {self.model_config(name).version}
        return tuple(sorted(versions, key=int))

    def is_model_ready(self, name: str, version: str = "") -> bool:
        return not self.exiting() and self._heard_lately and self.find(name, version) is not None

    async def unready_reason(self, name: str, version: str = "") -> str:
        """As the last snapshot has it: whether the model itself says so, the hub alone can ask."""
        return "" if self.is_model_ready(name, version) else "Model version not ready"

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
        return RequestOrigin.of(context, self._wants_headers)

    # What the hub answers as a whole

    async def ask_http(self, call: Callable[[int], HttpCall]) -> HttpAnswer:
        """The hub's answer to a request; `call` makes the message with a key."""
        key = self.next_key()
        answer: HttpAnswer = await self._ask(key, call(key))
        return answer

    @contextmanager
    def arriving(self, call: HttpCall) -> Iterator["asyncio.Queue[PieceMessage]"]:
        """The messages that answer a call in pieces, which ends with the block."""
        arriving = self._arriving[call.key] = asyncio.Queue[PieceMessage]()
        self.send(call)
        try:
            yield arriving
        except BaseException:
            self.send(CancelCall(call.key))
            raise
        finally:
            del self._arriving[call.key]

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

    def _on_answer(self, message: ModelAnswer) -> None:
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
        elif isinstance(message, HttpAnswer):
            self._on_piece(message)

    def _on_piece(self, message: PieceMessage) -> None:
        if message.key in self._arriving:
            self._arriving[message.key].put_nowait(message)

    def _on_failed(self, message: CallFailed) -> None:
        error, responses, waiting = message.error.error(), self.calls.get(message.key), self._waiting.get(message.key)
        if responses is not None:
            responses.on_end(error, message.notes)
        elif waiting is not None and not waiting.done():
            waiting.set_exception(error)
        elif message.key in self._arriving:
            self._on_piece(message)
        else:
            self._streams.fail(message.key, error)

    def _on_unsendable(self, message: FromFrontend, error: Exception) -> None:
        refusal = InvalidArgument(f"the request cannot be understood: {error}")
        if isinstance(message, EndedRequests):  # what a client asked for may be no number or text of msgpack
            self.send(EndedRequests(message.answered, message.others))
        if isinstance(message, ModelCall):
            self.exchange.take_back(message.inputs)
        if (key := getattr(message, "key", None)) is not None:
            self._on_failed(CallFailed(key, SentError.of(refusal)))

    def _on_cancel_requests(self, message: CancelRequests) -> None:
        text = self._texts.get(message.model)
        if text is not None:
            text.model.cancel_here(message.request_id)

    def _on_heartbeat(self, message: Heartbeat) -> None:
        self._heard = time.monotonic()
        readers = [text.reader_delays() for text in self._texts.values()]
        self.send(FrontendState(self._lag.state(), [each for each in readers if each.seconds]))

    def _on_stop(self, message: StopFrontend) -> None:
        self.stop_by_force = message.force
        self.stop_requested.set()

    def _on_snapshot(self, snapshot: HubSnapshot) -> None:
        before, self._snapshot, self._heard = self._snapshot, snapshot, time.monotonic()
        self._wants_headers = snapshot.has_routes or self._hub_logs
        if before is None or snapshot.models != before.models:
            self._serve(ServedModels.of_pickle(snapshot.models))
        if before is None or snapshot.logs != before.logs:
            apply_log_settings(snapshot.logs.settings())
        self._drop_regions(snapshot)
        self._map_regions(snapshot)
        waited = [text.building for text in self._texts.values() if not text.building.done()]
        if snapshot.cuda_regions:
            opening = asyncio.create_task(self._open_cuda_regions())
            opening.add_done_callback(lambda _: self.told.set())
            waited.append(opening)
        else:
            self.told.set()
        asyncio.gather(*waited, return_exceptions=True).add_done_callback(
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

    def _drop_regions(self, snapshot: HubSnapshot) -> None:
        mirror = self.shared_state.shared_memory
        for mapped in mirror.registered():
            if mapped not in snapshot.regions:
                mirror.unregister(mapped.name)
        for opened in mirror.registered_cuda():
            if opened not in snapshot.cuda_regions:
                mirror.unregister_cuda(opened.name)

    def _map_regions(self, snapshot: HubSnapshot) -> None:
        mirror = self.shared_state.shared_memory
        for region in snapshot.regions:
            if region not in mirror.registered():
                try:
                    mirror.register(*region)
                except CharoniaError as error:
                    _report_region(region.name, error)

    async def _open_cuda_regions(self) -> None:
        """Open those of the last snapshot, which takes long: another may come meanwhile, and waits here."""
        mirror = self.shared_state.shared_memory
        async with self._opening_regions:
            assert self._snapshot is not None
            for region in self._snapshot.cuda_regions:
                if region not in mirror.registered_cuda():
                    try:
                        await mirror.register_cuda(region)
                    except CharoniaError as error:
                        _report_region(region.name, error)
                    self._drop_regions(self._snapshot)

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
        if not self._hub_logs:
            log_request(context)
        elif key is not None and context.sequences:
            self._sequences.append((key, [SentSequence.of(each) for each in context.sequences]))

    def _before_flush(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        if self._answered or self._ended_otherwise:
            self.send(EndedRequests(self._answered, self._ended_otherwise, self._sequences))
            self._answered, self._ended_otherwise, self._sequences = [], [], []
        if released := self.exchange.released():
            self.send(TensorsRead(released))


def _report_region(name: str, error: CharoniaError) -> None:
    log.error("shared memory region '%s' cannot be used here: %s", name, error.message)


def _report(name: str, building: "asyncio.Task[None]") -> None:
    if not building.cancelled() and (error := building.exception()) is not None:
        log.error("model '%s' cannot be read: %s", name, error)


@lru_cache(64)
def _unpickled_config(data: bytes) -> ModelConfig:
    config = pickle.loads(data)
    assert isinstance(config, ModelConfig)
    return config
