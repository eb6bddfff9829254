"""ModelInfer, and ModelStreamInfer: many requests over one stream, answered side by side.

Nothing is queued. A client that does not read holds up what is written to its own stream, whose unread tokens merge in
the engine, and at last the reading of its requests.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from weakref import WeakValueDictionary

import grpc
import msgspec
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2 as pb

from ...core.direct_stream import DirectStream, ReadyResponse
from ...core.errors import CharoniaError, InvalidArgument, ServerExiting, Unsupported
from ...core.gateway import ModelHandle
from ...core.native_calls import CONTROL_FLOW
from ...core.request import InferResponse, ParameterValue
from ...core.request_context import RequestContext
from ...core.tasks import RequestTaskGroup
from ...telemetry.shared_state import ServerLookup
from ..http.error_responses import INTERNAL_SERVER_ERROR
from ..infer_call import InferCall, read_up_to_two, supports_single_response, wants_stream
from .direct_writes import INFER_RESPONSE, StreamWrites
from .known_requests import KnownRequest
from .messages import (
    SHUTTING_DOWN,
    check_message,
    parse_infer_message,
    parse_version,
    wants_empty_final,
    write_response,
    write_response_off_loop,
    write_stream_error,
)
from .settings import Caller, GrpcCallPolicy, RpcContext, call_metadata, peer_address
from .wire_format import ProtoMessage, delimited

log = logging.getLogger(__name__)

_DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy"
_STREAM = "ModelStreamInfer"
_ARM = "charonia_arm"
_WARNING = "charonia_warning"
_ANYONE = Caller()
_SHORT_REQUESTS = (KnownRequest, pb.ModelInferRequest)
_MAX_CONCURRENT = 1024
"""Requests of one stream that are answered at a time; the next one is read when one of them is done."""


async def model_infer(lookup: ServerLookup, policy: GrpcCallPolicy, message: ProtoMessage, rpc: RpcContext) -> bytes:
    """The encoded response to a ModelInfer call. Raises `CharoniaError`, as `model_stream_infer`."""
    metadata = call_metadata(rpc)
    with lookup.open_request("ModelInfer", metadata) as context:
        context.client = address = peer_address(rpc)
        caller = policy.identify_caller("ModelInfer", metadata, address)
        caller.note_in(context)
        check_message(message)
        context.id = message.id
        if lookup.exiting():
            raise ServerExiting(SHUTTING_DOWN)
        model = await lookup.acquire(context, message.model_name, parse_version(message.model_version))
        config = model.config
        if not supports_single_response(config):
            raise Unsupported(_DECOUPLED)
        call = await _decoded(_parse(lookup, message, caller), model)
        if config.decoupled and wants_stream(call.request):
            raise Unsupported(f"{_DECOUPLED}: set stream to false, or use ModelStreamInfer", field="stream")
        stream = model.infer(call.request)
        if type(stream) is ReadyResponse:
            responses = [stream.response]
        else:
            async with aclosing(stream):
                responses = await read_up_to_two(stream, config.decoupled)
        if len(responses) != 1:
            raise Unsupported(_DECOUPLED)
        response = _with_notes(responses[0], context)
        return await write_response_off_loop(model.config, call, response, limit=caller.max_response_size)


async def model_stream_infer(
    lookup: ServerLookup, policy: GrpcCallPolicy, rpc: RpcContext, closing: asyncio.Event
) -> None:
    """Answer a ModelStreamInfer call, until `closing` is set or the client has no more requests."""
    metadata, address = call_metadata(rpc), peer_address(rpc)
    try:
        caller = policy.identify_caller(_STREAM, metadata, address)
    except CharoniaError:
        with lookup.open_request(_STREAM, metadata) as context:
            context.client = address
            raise
    await StreamInferCall(lookup, rpc, closing, caller).run()


def answer_now(lookup: ServerLookup, policy: GrpcCallPolicy, message: ProtoMessage, rpc: RpcContext) -> bytes | None:
    """The encoded response of a model that computes in the event loop, without a context for the request: that costs
    more than all else that becomes of a small one. None where it takes more, or is to be refused. Raises what the model
    raises."""
    if not policy.takes_all or type(message) not in _SHORT_REQUESTS:
        return None
    model = lookup.find_inline(message.model_name, message.model_version)
    if model is None or model.config.decoupled:
        return None
    try:
        call = _parse(lookup, message, _ANYONE)
    except CharoniaError:
        return None
    if call.deferred or not call.returns_plainly:
        return None
    try:
        answer = model.answer_now(call.request)
        if answer is None:
            return None
        return write_response(model.config, call, answer[0], limit=policy.max_response_size)
    except Exception:
        metadata = call_metadata(rpc)
        with lookup.open_request("ModelInfer", metadata) as context:  # for the log
            policy.identify_caller("ModelInfer", metadata, peer_address(rpc)).note_in(context)
            context.id, context.model, context.version = message.id, model.config.name, model.config.version
            context.counted = True
            raise


def _parse(lookup: ServerLookup, message: ProtoMessage, caller: Caller) -> InferCall:
    if type(message) is KnownRequest:
        return message.with_parameters(caller.parameters)
    return parse_infer_message(message, lookup.shared_state.shared_memory, caller)


async def _decoded(call: InferCall, model: ModelHandle) -> InferCall:
    return await call.decode_deferred(model) if call.deferred else call


class StreamInferCall:
    """Answers the requests of one stream until the client has no more, or `closing` is set.

    Requests of one sequence reach their model in their order. Models that are not decoupled answer in that order. With
    the metadata `triton_grpc_error: true` the first error ends the whole stream.
    """

    def __init__(self, lookup: ServerLookup, context: RpcContext, closing: asyncio.Event, caller: Caller) -> None:
        self._lookup = lookup
        self._context = context
        self._closing = closing
        self._caller = caller
        self._strict = ("triton_grpc_error", "true") in call_metadata(context)
        self._free_slots = asyncio.Semaphore(_MAX_CONCURRENT)
        self._looking_up = asyncio.Lock()
        self._turns: WeakValueDictionary[tuple[str, ParameterValue], asyncio.Lock] = WeakValueDictionary()
        """By model and sequence, the lock that a request holds while it is decoded."""
        self._writes = StreamWrites(context)
        self._last_in_order: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Return when everything is answered; cancelling this cancels every request. Raises `CharoniaError`, the status
        that the call ends with."""
        try:
            async with RequestTaskGroup() as answering, aclosing(self._requests()) as requests:
                async for request in requests:
                    await self._free_slots.acquire()
                    task = answering.create_task(self._answer(request))
                    task.add_done_callback(lambda _: self._free_slots.release())
        except ExceptionGroup as errors:
            raise _first(errors) from None
        if self._closing.is_set():
            raise ServerExiting(SHUTTING_DOWN)

    async def _requests(self) -> AsyncGenerator[ProtoMessage, None]:
        closed = asyncio.create_task(self._closing.wait())
        coming: asyncio.Task[ProtoMessage] | None = None
        try:
            while True:
                coming = asyncio.create_task(self._context.read())
                await asyncio.wait((coming, closed), return_when=asyncio.FIRST_COMPLETED)
                if closed.done() or coming.result() is grpc.aio.EOF:
                    return
                yield coming.result()
        except DecodeError as error:
            with self._lookup.open_request(_STREAM, call_metadata(self._context)) as context:
                self._caller.note_in(context)
                raise InvalidArgument(str(error)) from None
        finally:
            for task in (closed, coming):
                if task is not None:
                    task.cancel()

    async def _answer(self, message: ProtoMessage) -> None:
        before: asyncio.Task[None] | None = None
        try:
            with self._lookup.open_request(_STREAM, call_metadata(self._context)) as context:
                self._caller.note_in(context)
                context.id = message.id
                model = None
                async with self._looking_up:  # tasks begin in the order of their requests, and wait in it for a model
                    if not self._lookup.exiting():
                        version = parse_version(message.model_version)
                        model = await self._lookup.acquire(context, message.model_name, version)
                    if model is None or not model.config.decoupled:
                        before, self._last_in_order = self._last_in_order, asyncio.current_task()
                if model is None:
                    raise ServerExiting(SHUTTING_DOWN)
                async with aclosing(self._responses(model, message, context)) as responses:
                    async for response in responses:
                        await self._send(delimited(INFER_RESPONSE, response), before)
        except CharoniaError as error:
            if self._strict:
                raise
            await self._send(write_stream_error(message, error), before)
        except CONTROL_FLOW:
            raise
        except BaseException:
            log.exception("a request of a stream failed")
            await self._send(write_stream_error(message, INTERNAL_SERVER_ERROR), before)

    async def _responses(
        self, model: ModelHandle, message: ProtoMessage, context: RequestContext
    ) -> AsyncGenerator[bytes, None]:
        """The encoded responses to one request, each marked whether it is the last."""
        config = model.config
        final = False
        begun = False
        limit = self._caller.max_response_size
        call = await self._read_call(model, message)
        async with aclosing(model.infer(call.request)) as responses, AsyncExitStack() as direct:
            async for response in responses:
                final = response.final or not config.decoupled
                noted = response if begun else _with_notes(response, context)
                yield await write_response_off_loop(model.config, call, noted, final, limit)
                if not begun and config.decoupled and isinstance(responses, DirectStream):
                    direct.enter_context(self._writes.direct(responses, model.config, call, limit))
                begun = True
        if not final and wants_empty_final(message):
            yield await write_response_off_loop(model.config, call, InferResponse(()), True)

    async def _read_call(self, model: ModelHandle, message: ProtoMessage) -> InferCall:
        """What a message asks for. A request that is small waits for the decoding of those before it in its sequence;
        who gets it hands it over at once."""
        call = _parse(self._lookup, message, self._caller)
        sequence = call.request.parameters.get("sequence_id")
        if not sequence:
            return await _decoded(call, model)
        turn = self._turns.setdefault((model.name, sequence), asyncio.Lock())
        async with turn:  # which is given in the order in which it is asked for
            return await _decoded(call, model)

    async def _send(self, message: ProtoMessage | bytes, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait((before,))
        await self._writes.write(message)


def _with_notes(response: InferResponse, context: RequestContext) -> InferResponse:
    """The first response to a request, with what HTTP tells in headers."""
    if not context.warnings and not context.route:
        return response
    notes = {_WARNING: "; ".join(context.warnings), _ARM: context.arm}
    parameters = {**response.parameters, **{name: note for name, note in notes.items() if note}}
    return msgspec.structs.replace(response, parameters=parameters)


def _first(error: Exception) -> Exception:
    """The error that ended a task group: errors of the tasks that it cancelled come after."""
    return _first(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error
