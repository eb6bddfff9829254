"""A worker's end of the link: its requests and calls, by the keys that it gives them, and what the hub answers."""

import asyncio
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol, TypeAlias

from ..api.http.error_responses import printable
from ..core.errors import CharoniaError, InvalidArgument, SentError
from ..core.request import InferResponse
from ..core.request_context import DONE, RequestContext, RequestEnd
from ..telemetry.request_log import log_request
from .link import FrameLink
from .messages import (
    CallFailed,
    CancelCall,
    EndedRequests,
    FromWorker,
    GrpcAnswer,
    GrpcCall,
    HttpAnswer,
    HttpCall,
    HttpPiece,
    LoneRequest,
    ModelAnswer,
    ModelCall,
    PieceWanted,
    RequestOrigin,
    ResponseNotes,
    ResponsesEnded,
    SentSequence,
    TensorsRead,
    TextAnswer,
    ToWorker,
    decode_to_worker,
)
from .remote_streams import RemoteStreams
from .sequence_messages import SequenceSteps
from .tensors import TensorExchange

_TELL_SECONDS = 0.01
"""Seconds after which, at the latest, the hub hears of requests that ended as it expects."""

PieceMessage: TypeAlias = HttpAnswer | HttpPiece | PieceWanted | CallFailed


class OpenResponses(Protocol):
    """The responses to a call of a model, as they come."""

    def on_item(self, item: Any, last: bool, notes: ResponseNotes | None) -> None: ...

    def on_end(self, error: CharoniaError | None = None, notes: ResponseNotes | None = None) -> None: ...


class HubConnection:
    """One worker's end of the link. `handlers`: of messages that answer no call. `hub_logs`: requests, which is then
    told of their sequences. `files`: of the shared memory of this end, and of the hub's; closed here."""

    def __init__(self, files: tuple[int, int], hub_logs: bool, handlers: Mapping[type, Callable[[Any], None]]) -> None:
        self.lost = asyncio.Event()
        """The hub is gone."""
        self.link: FrameLink[FromWorker, ToWorker]
        self.link = FrameLink(decode_to_worker, self._receive, self.lost.set, self._on_unsendable)
        self.link.before_flush = self._before_flush
        self.exchange = TensorExchange(*files, self.link.schedule_from_any_thread)
        for file in files:
            os.close(file)
        self.send = self.link.send
        self.next_key = count(1).__next__
        """A number that no request, call or sequence of this worker had."""
        self.calls: dict[int, OpenResponses] = {}
        self.streams = RemoteStreams()
        self.wants_headers = hub_logs
        """Whether the hub is to have the headers of requests."""
        self.has_traces = False
        """Whether requests may be traced, so that the hub wants to know at once when they end."""
        self._hub_logs = hub_logs
        self._keys: dict[RequestContext, int] = {}
        self._answered: list[int] = []
        self._ended_otherwise: list[tuple[int, RequestEnd, str]] = []
        self._sequences: list[tuple[int, list[SentSequence]]] = []
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._arriving: dict[int, asyncio.Queue[PieceMessage]] = {}
        self._telling: asyncio.TimerHandle | None = None
        self._handlers: Mapping[type, Callable[[Any], None]] = {
            ModelAnswer: self._on_answer,
            TextAnswer: self._on_text,
            TensorsRead: lambda message: self.exchange.on_released(message.offsets),
            ResponsesEnded: self._on_responses_ended,
            CallFailed: self._on_failed,
            SequenceSteps: self.streams.on_steps,
            HttpAnswer: self._on_reply,
            HttpPiece: self._on_piece,
            PieceWanted: self._on_piece,
            GrpcAnswer: self._on_reply,
            **handlers,
        }

    def key_of(self, context: RequestContext) -> int:
        """The key by which the hub knows a request, or will."""
        key = self._keys.get(context)
        if key is None:
            key = self._keys[context] = self.next_key()
        return key

    def origin_of(self, context: RequestContext) -> RequestOrigin:
        return RequestOrigin.of(context, self.wants_headers)

    # What the hub answers as a whole

    async def ask_http(self, call: Callable[[int], HttpCall]) -> HttpAnswer:
        """The hub's answer to a request; `call` makes the message with a key."""
        key = self.next_key()
        answer: HttpAnswer = await self.ask(key, call(key))
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
        answer: GrpcAnswer = await self.ask(key, GrpcCall(key, rpc, message))
        return answer.fields

    async def ask(self, key: int, message: FromWorker, give_back: Callable[[Any], None] = lambda _: None) -> Any:
        """The answer to a call, which ends with the task that waits for it; `give_back` gets one that nobody takes.
        Raises the error that the hub tells."""
        waiting = self._waiting[key] = asyncio.get_running_loop().create_future()
        self.send(message)
        try:
            return await waiting
        except asyncio.CancelledError:
            if waiting.done() and not waiting.cancelled():
                give_back(waiting.result())
            self.send(CancelCall(key))
            raise
        finally:
            del self._waiting[key]

    def is_awaited(self, key: int) -> bool:
        """Whether a task still waits for the answer to this call."""
        waiting = self._waiting.get(key)
        return waiting is not None and not waiting.done()

    def resolve(self, key: int, answer: object) -> None:
        """Give the task that waits for it the answer to its call."""
        if self.is_awaited(key):
            self._waiting[key].set_result(answer)

    # Messages

    def _receive(self, message: ToWorker) -> None:
        self._handlers[type(message)](message)

    def _on_answer(self, message: ModelAnswer) -> None:
        responses = self.calls.get(message.key)
        if responses is None:
            self.exchange.discard(message.outputs)
            return
        outputs = tuple([self.exchange.tensor(output) for output in message.outputs])
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

    def _on_reply(self, message: HttpAnswer | GrpcAnswer) -> None:
        if self.is_awaited(message.key):
            self.resolve(message.key, message)
        elif isinstance(message, HttpAnswer):
            self._on_piece(message)

    def _on_piece(self, message: PieceMessage) -> None:
        if message.key in self._arriving:
            self._arriving[message.key].put_nowait(message)

    def _on_failed(self, message: CallFailed) -> None:
        error, responses = message.error.error(), self.calls.get(message.key)
        if responses is not None:
            responses.on_end(error, message.notes)
        elif self.is_awaited(message.key):
            self._waiting[message.key].set_exception(error)
        elif message.key in self._arriving:
            self._on_piece(message)
        else:
            self.streams.fail(message.key, error)

    def _on_unsendable(self, message: FromWorker, error: Exception) -> None:
        refusal = InvalidArgument(f"the request cannot be understood: {error}")
        if isinstance(message, EndedRequests):  # what a client asked for may be no number or text of msgpack
            self.send(EndedRequests(message.answered, message.others))
        if isinstance(message, ModelCall):
            self.exchange.take_back(message.inputs)
        if (key := getattr(message, "key", None)) is not None:
            self._on_failed(CallFailed(key, SentError.of(refusal)))

    # The ends of requests

    def on_request_end(self, context: RequestContext) -> None:
        """Tell the hub, which counts the request, and log it unless the hub does."""
        key, end = self._keys.pop(context, None), context.end
        assert end is not None
        if key is None:
            model, version = printable(context.model), printable(context.version)
            self.send(LoneRequest(self.origin_of(context), model, version, context.model_found, end))
        elif end == DONE:
            self._answered.append(key)
            if context.route or self.has_traces:
                self.link.schedule()
            elif self._telling is None:  # with the next call, most likely
                self._telling = asyncio.get_running_loop().call_later(_TELL_SECONDS, self.link.schedule)
        else:
            self._ended_otherwise.append((key, end, context.id))
            self.link.schedule()
        if not self._hub_logs:
            log_request(context)
        elif key is not None and context.sequences:
            self._sequences.append((key, [SentSequence.of(sequence) for sequence in context.sequences]))

    def _before_flush(self) -> None:
        if self._telling is not None:
            self._telling.cancel()
            self._telling = None
        if self._answered or self._ended_otherwise:
            self.send(EndedRequests(self._answered, self._ended_otherwise, self._sequences))
            self._answered = []
            self._ended_otherwise = []
            self._sequences = []
        if released := self.exchange.released():
            self.send(TensorsRead(released))
