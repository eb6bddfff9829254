"""The hub's end of one worker's link: its requests, in contexts and calls of the hub.

A worker's request has a context here too, by which it is counted, traced, and kept from an unload; the worker says when
and how it ended. The same endpoints as with one worker answer what is not inference.
"""

import asyncio
import logging
import pickle
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing, contextmanager
from typing import Any

import msgspec

from ..api.http.eager import start_eagerly
from ..api.http.error_responses import INTERNAL_SERVER_ERROR
from ..core.errors import CharoniaError, InvalidArgument, SentError
from ..core.metrics import Labels, Reading
from ..core.request import GenerateRequest, InferRequest
from ..core.request_context import CANCELLED, DONE, RequestContext, RequestEnd
from ..engine.client.llm import LlmModel
from ..repository.model_handle import LoadedModelHandle
from ..repository.model_registry import LoadedModel
from ..repository.request_validation import validate_request
from ..telemetry.logging_setup import write_lines
from ..telemetry.loop_lag import LoopState
from ..telemetry.request_trace import request_trace
from .control_calls import ControlCalls
from .hub import ControlHub
from .hub_link import AnsweredCall, HubLink
from .link import FrameLink
from .messages import (
    AcquireCall,
    AcquiredModel,
    CallFailed,
    CancelCall,
    EndedRequests,
    FromWorker,
    GrpcCall,
    HttpCall,
    HttpPiece,
    LoneRequest,
    ModelAnswer,
    ModelCall,
    PieceWanted,
    RequestOrigin,
    ResponsesEnded,
    ResponsesRead,
    TensorsRead,
    TextAnswer,
    TextCall,
    ToWorker,
    decode_from_worker,
    decode_origin,
)
from .open_requests import OpenCall, OpenRequest, text_chunks
from .response_sender import ResponseSender
from .sequence_messages import AbortSequence, CancelRequests, SubmitSequence
from .state_messages import (
    BEAT_SECONDS,
    HUNG_SECONDS,
    Heartbeat,
    LogText,
    SnapshotAcknowledged,
    StopWorker,
    WorkerListening,
    WorkerState,
)
from .tensors import TensorExchange
from .token_relay import TokenRelay

log = logging.getLogger(__name__)

_MOST_UNANSWERED = round(HUNG_SECONDS / BEAT_SECONDS)
"""Heartbeats in a row, after which a worker is given up: nobody else notices that a fourth, say, of all connections
gets no answer."""

_ONLY_TEXT = ("tokenize", "detokenize")
"""Endpoints that ask no engine."""

_BODY_TO_COME = ("infer", "generate", "generate_stream")
"""Endpoints that look their model up before they read what is asked of it."""


class WorkerSession:
    """One worker, from its start to its end. `listening` and `lost` are set by what comes over its link;
    `acknowledged`: the number of the last snapshot that it goes by. `mine`, `theirs`: files of both ends' shared
    memory."""

    def __init__(self, hub: ControlHub, name: str, mine: int, theirs: int) -> None:
        self.listening, self.lost = asyncio.Event(), asyncio.Event()
        self.acknowledged = 0
        self._loop: LoopState | None = None
        self._asked_at: float | None = None
        self._unanswered = 0
        self._hub = hub
        self._gateway = hub.gateway
        self._name = name
        self._request_failed = f"{name}: a request failed"
        self._traces = hub.gateway.shared_state.traces
        self.link: HubLink = FrameLink(decode_from_worker, self._receive, self._on_lost, self._on_unsendable)
        self._exchange = TensorExchange(mine, theirs, self.link.schedule_from_any_thread)
        self._responses = ResponseSender(self.link, self._exchange)
        self._relay = TokenRelay(self.link)
        self.link.before_flush, self.link.on_drained = self._before_flush, self.link.schedule
        self._open: dict[int, OpenRequest] = {}
        self._inline: dict[int, LoadedModel] = {}
        self._asked: dict[int, OpenCall] = {}
        self._control = ControlCalls(self.link, hub.app, hub.control_rpc)
        self._handlers: Mapping[type, Callable[[Any], None]] = {
            ModelCall: self._on_infer,
            TextCall: self._on_text,
            AcquireCall: self._on_acquire,
            TensorsRead: lambda message: self._exchange.on_released(message.offsets),
            ResponsesRead: self._on_read,
            CancelCall: self._on_cancel,
            EndedRequests: self._on_ended,
            LoneRequest: self._on_lone,
            SubmitSequence: self._on_submit,
            AbortSequence: lambda message: self._relay.abort(message.key),
            CancelRequests: lambda message: hub.cancel_elsewhere(message.model, message.request_id, self),
            HttpCall: self._control.on_http,
            HttpPiece: self._control.on_piece,
            PieceWanted: self._control.on_piece_wanted,
            GrpcCall: self._control.on_grpc,
            SnapshotAcknowledged: self._on_acknowledged,
            WorkerListening: lambda _: self.listening.set(),
            WorkerState: self._on_state,
            LogText: lambda message: write_lines(message.text),
        }
        hub.sessions.add(self)
        self.link.send(hub.push())

    def stop(self, force: bool) -> None:
        """Have it close its sockets, when its requests are answered or, with `force`, at once."""
        self.link.send(StopWorker(force))

    def beat(self) -> None:
        """Tell it that this loop turns; it tells how its own does. One that hangs is given up."""
        if self._asked_at is None:
            self._asked_at = time.monotonic()
        self._unanswered += self.listening.is_set()
        if self._unanswered <= _MOST_UNANSWERED:
            self.link.send(Heartbeat())
        else:
            log.error("%s hangs: it has not answered for a minute", self._name)
            self.link.abort()

    def loop_readings(self, labels: Labels) -> Iterator[Reading]:
        """The readings of its event loop for a scrape; one that does not answer is late by as long."""
        if self._loop is not None and not self.lost.is_set():
            silence = 0.0 if self._asked_at is None else time.monotonic() - self._asked_at
            yield from msgspec.structs.replace(self._loop, lag=max(self._loop.lag, silence)).readings(labels)

    def _on_state(self, message: WorkerState) -> None:
        self._loop = message.loop
        self._asked_at = None
        self._unanswered = 0
        for delays in message.readers:
            loaded = self._hub.census.model(delays.model)
            if loaded is not None and isinstance(loaded.model, LlmModel):
                loaded.model.metrics.merged_tokens += delays.merged_tokens
                loaded.model.metrics.unread.add_seconds(delays.seconds)

    def _before_flush(self) -> None:
        self._relay.tell()
        if released := self._exchange.released():
            self.link.send(TensorsRead(released))

    def _receive(self, message: FromWorker) -> None:
        self._handlers[type(message)](message)

    def _on_lost(self) -> None:
        """The worker is gone, and all its clients with it."""
        self._hub.sessions.discard(self)
        self._relay.close()
        self._control.close()
        for key in [*self._open, *self._inline]:
            self._end(key, CANCELLED)
        self._exchange.close()
        self.lost.set()
        self._hub.on_progress()

    def _on_unsendable(self, message: ToWorker, error: Exception) -> None:
        log.error("%s: an answer cannot leave this process: %s", self._name, error)
        if isinstance(message, ModelAnswer):
            self._exchange.take_back(message.outputs)
        if (key := getattr(message, "key", None)) is not None:
            self.link.send(CallFailed(key, SentError.of(INTERNAL_SERVER_ERROR)))

    def _on_acknowledged(self, message: SnapshotAcknowledged) -> None:
        self.acknowledged = max(self.acknowledged, message.number)  # they may overtake each other
        self._hub.on_progress()

    # Requests

    def _open_request(self, key: int, origin: RequestOrigin) -> OpenRequest:
        context = self._gateway.open_request(origin.endpoint, origin.headers)
        origin.note_in(context, logged=not self._traces.sends_spans)
        opened = self._open[key] = OpenRequest(context)
        return opened

    def _on_infer(self, call: ModelCall) -> None:
        inputs = {sent.name: self._exchange.tensor(sent) for sent in call.inputs}
        request = InferRequest(call.request_id, inputs, call.outputs, call.parameters)
        opened = self._open.get(call.request)
        if opened is None:
            if self._answer_inline(call, request):
                return
            opened = self._open_request(call.request, decode_origin(call.origin))
        running = opened.calls[call.key] = OpenCall()
        running.task = start_eagerly(self._infer(call, request, opened, running))
        if running.task is not None:
            self._asked[call.key] = running

    def _answer_inline(self, call: ModelCall, request: InferRequest) -> bool:
        """Answer with a model that computes in the event loop in less time than a context for the request would take.
        False if it is none, or refuses the request, or the request may be traced."""
        gateway = self._gateway
        entry = gateway.registry.entries.get(call.model)
        version = None if entry is None else entry.find_version(call.version)
        loaded = None if version is None else version.loaded
        if loaded is None or loaded.capabilities.inline is None or self._traces.may_trace or gateway.exiting():
            return False
        if call.checked != self._hub.census.number_of(loaded):
            try:
                validate_request(loaded.config, request)
            except InvalidArgument:
                return False
        with AnsweredCall(self.link, call.key, self._request_failed):
            answer = loaded.capabilities.inline.answer_now(request)
            if answer is None:
                return False
            response, _ = answer
            self._responses.send(call.key, response, last=True)
        if call.request not in self._inline:
            loaded.in_flight.increment()
            gateway.in_flight.increment()
            self._inline[call.request] = loaded
        return True

    async def _infer(self, call: ModelCall, request: InferRequest, opened: OpenRequest, running: OpenCall) -> None:
        key = call.key
        with self._ended_call(key, opened):
            handle = opened.handle
            if handle is None:
                handle = opened.handle = await self._gateway.acquire(opened.context, call.model, call.version)
            responses = handle.infer(request)
            try:
                if handle.config.decoupled:
                    await self._responses.send_stream(key, responses, opened, running)
                else:
                    await self._responses.send_only(key, responses, opened)
            finally:
                await responses.aclose()

    @contextmanager
    def _ended_call(self, key: int, opened: OpenRequest) -> Iterator[None]:
        """Answers a call with the error that its block raises, and forgets it at the block's end."""
        try:
            with AnsweredCall(self.link, key, self._request_failed, opened.notes):
                yield
        finally:
            del opened.calls[key]
            self._asked.pop(key, None)

    def _on_text(self, call: TextCall) -> None:
        opened = self._open.get(call.request)
        if opened is None or opened.handle is None:
            return
        if opened.tickets:  # the model takes a place itself
            opened.tickets.pop().release()
        running = self._asked[call.key] = opened.calls[call.key] = OpenCall()
        running.task = start_eagerly(self._generate(call, opened, opened.handle, running))

    async def _generate(
        self, call: TextCall, opened: OpenRequest, handle: LoadedModelHandle, running: OpenCall
    ) -> None:
        key = call.key
        with self._ended_call(key, opened):
            async with aclosing(text_chunks(handle, call)) as chunks:
                async for chunk in chunks:
                    await running.wait_for_reader()
                    self.link.send(TextAnswer(key, chunk, opened.notes()))
            self.link.send(ResponsesEnded(key))

    def _on_acquire(self, call: AcquireCall) -> None:
        opened = self._open_request(call.key, call.origin)
        opened.finding = start_eagerly(self._acquire(call, opened))

    async def _acquire(self, call: AcquireCall, opened: OpenRequest) -> None:
        context = opened.context
        hub = self._hub
        context.body = call.body
        with AnsweredCall(self.link, call.key, f"{self._name}: a model could not be looked up"):
            handle = opened.handle = await self._gateway.acquire(context, call.model, call.version)
            loaded = handle.loaded
            is_text = loaded.capabilities.text is not None
            follows = is_text and (handle.needs_full_request or self._keeps_tensors(context))
            if is_text:
                handle.start()
            context.logged = not (follows or self._traces.sends_spans)
            number = hub.census.number_of(loaded)
            stats = loaded.model.stats()
            if number not in hub.announced:
                hub.push()
            config = b"" if number in hub.announced and not context.route else pickle.dumps(handle.config)
            names = context.model, context.version, context.adapter, context.route
            kv_tokens = stats.kv_tokens, stats.kv_token_capacity
            refusal = None if follows else self._admit(opened, loaded, call)
            self.link.send(AcquiredModel(call.key, number, *names, config, kv_tokens, follows, refusal))

    def _keeps_tensors(self, context: RequestContext) -> bool:
        """Whether the request's trace is to have its tensors, which are to pass here then."""
        trace = request_trace(context, self._traces) if self._traces.samples else None
        return trace is not None and trace.settings.records_tensors

    def _admit(self, opened: OpenRequest, loaded: LoadedModel, call: AcquireCall) -> SentError | None:
        """Take the places in the queue of the request's sequences, before a worker makes tokens of its text; the
        error if there are too few."""
        context = opened.context
        if not isinstance(loaded.model, LlmModel) or context.endpoint in _ONLY_TEXT:
            return None
        generation = GenerateRequest(id="", prompt=(), prompt_count=call.prompts, choice_count=call.choices)
        context.on_end(lambda _: opened.release_tickets())
        try:
            for _ in range(call.prompts * call.choices):
                opened.tickets.append(loaded.model.client.admit(generation, context.tenant))
        except CharoniaError as error:
            opened.release_tickets()
            return SentError.of(error)
        if context.endpoint in _BODY_TO_COME:  # which may take its client a minute
            opened.release_tickets()
        return None

    def _on_read(self, message: ResponsesRead) -> None:
        running = self._asked.get(message.key)
        if running is not None:
            running.add_credit(message.count)

    def _on_cancel(self, message: CancelCall) -> None:
        running = self._asked.get(message.key)
        if running is None:
            self._control.cancel(message.key)
        elif running.task is not None:
            running.task.cancel()

    def _on_ended(self, message: EndedRequests) -> None:
        for key, sequences in message.sequences:
            if key in self._open:
                self._open[key].context.sequences[:] = sequences
        for key in message.answered:
            self._end(key, DONE)
        for key, end, id_ in message.others:
            self._end(key, end, id_)

    def _end(self, key: int, end: RequestEnd, id_: str = "") -> None:
        """Count a request that has ended like that."""
        loaded, opened = self._inline.pop(key, None), self._open.pop(key, None)
        if loaded is not None:  # which has answered one of its calls, if not all
            loaded.in_flight.decrement()
            self._gateway.in_flight.decrement()
        if opened is None:
            if loaded is not None and loaded.capabilities.inline is not None:
                loaded.capabilities.inline.count_end(end)
            return
        context = opened.context
        if end != DONE:
            context.id, context.end = id_ or context.id, end
            for sequence in context.sequences:
                sequence.end = end
        elif context.end is None:
            context.finish()  # not by a model's responses: it was only asked for tokens, say
        if not (tasks := opened.tasks):
            context.close()
            return
        for task in tasks:
            task.cancel()
        asyncio.gather(*tasks, return_exceptions=True).add_done_callback(lambda _: context.close())

    def _on_lone(self, message: LoneRequest) -> None:
        context = self._gateway.open_request(message.origin.endpoint, message.origin.headers)
        message.origin.note_in(context, logged=not self._traces.sends_spans)
        context.model = message.model
        context.version = message.version
        context.model_found = message.model_found
        context.end = message.end
        context.close()

    def _on_submit(self, message: SubmitSequence) -> None:
        opened = self._open.get(message.request)
        if opened is None or opened.handle is None:
            return
        model = opened.handle.loaded.model
        assert isinstance(model, LlmModel)
        ticket = opened.tickets.pop() if opened.tickets else None
        self._relay.submit(message, opened.context, model, ticket)
