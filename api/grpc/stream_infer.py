"""One ModelStreamInfer call: many requests over one stream, answered side by side.

Nothing is queued here. A client that does not read holds up the writers of its own stream, whose unread tokens the
engine merges, and at last the reading of its requests.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, contextmanager, suppress

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2 as pb

from ...core.errors import CharoniaError, InvalidArgument, ServerExiting
from ...core.request import InferResponse
from ...core.request_context import RequestContext
from ...telemetry.shared_state import ServerGateway
from ..deferred_tensors import decode_deferred
from ..http.error_responses import INTERNAL_SERVER_ERROR
from .call_policy import Caller
from .request_messages import parse_infer_message, wants_empty_final
from .response_messages import ProtoMessage, mark_final, parse_version, write_response_off_loop, write_stream_error
from .status import SHUTTING_DOWN, RpcContext, call_metadata, client_request_id, status_details

log = logging.getLogger(__name__)

_MAX_CONCURRENT = 1024
"""Requests of one stream that are answered at a time; the next one is read when one of them is done."""

RPC_NAME = "ModelStreamInfer"


@contextmanager
def recorded_refusals(gateway: ServerGateway, context: RpcContext) -> Iterator[None]:
    """Leave a record of a request that the block refuses before it was read."""
    try:
        yield
    except CharoniaError:
        with gateway.open_request(RPC_NAME, call_metadata(context)):
            raise


class StreamInferCall:
    """Reads requests until the client has no more or `closing` is set, and answers all that were read.

    Responses of models that are not decoupled come in the order of their requests. With the metadata
    `triton_grpc_error: true` the first error of a request ends the whole stream.
    """

    def __init__(self, gateway: ServerGateway, context: RpcContext, closing: asyncio.Event, caller: Caller) -> None:
        self._gateway = gateway
        self._context = context
        self._closing = closing
        self._caller = caller
        self._strict = ("triton_grpc_error", "true") in call_metadata(context)
        self._free_slots = asyncio.Semaphore(_MAX_CONCURRENT)
        self._writing = asyncio.Lock()
        self._last_in_order: asyncio.Task[None] | None = None

    async def run(self) -> None:
        """Return when everything is answered; cancelling this cancels every request.

        Raises:
            CharoniaError: the status that the call ends with.
        """
        try:
            async with asyncio.TaskGroup() as answering, aclosing(self._requests()) as requests:
                async for request in requests:
                    await self._free_slots.acquire()
                    self._start(request, answering)
        except ExceptionGroup as errors:
            raise _first(errors) from None
        if self._closing.is_set():
            raise ServerExiting(SHUTTING_DOWN)

    def _start(self, request: ProtoMessage, answering: asyncio.TaskGroup) -> None:
        in_order = False
        with suppress(CharoniaError):  # the task finds out by itself, and answers with the error
            config = self._gateway.model_config(request.model_name, parse_version(request.model_version))
            in_order = not config.decoupled
        task = answering.create_task(self._answer(request, self._last_in_order if in_order else None))
        task.add_done_callback(lambda _: self._free_slots.release())
        if in_order:
            self._last_in_order = task

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
            with recorded_refusals(self._gateway, self._context):
                raise InvalidArgument(str(error)) from None
        finally:
            for task in (closed, coming):
                if task is not None:
                    task.cancel()

    async def _answer(self, request: ProtoMessage, after: asyncio.Task[None] | None) -> None:
        try:
            with self._gateway.open_request(RPC_NAME, call_metadata(self._context)) as context:
                context.id, context.client_id = request.id, client_request_id(self._context)
                context.tenant, context.tenant_weight = self._caller.tenant
                async with aclosing(_responses(self._gateway, request, self._caller, context)) as responses:
                    async for response in responses:
                        await self._send(pb.ModelStreamInferResponse(infer_response=response), after)
        except CharoniaError as error:
            if self._strict:
                raise
            await self._send(write_stream_error(request, status_details(error)), after)
        except Exception:
            log.exception("a request of a stream failed")
            await self._send(write_stream_error(request, INTERNAL_SERVER_ERROR.message), after)

    async def _send(self, message: ProtoMessage, after: asyncio.Task[None] | None) -> None:
        if after is not None:
            await asyncio.wait((after,))
        async with self._writing:
            try:
                await self._context.write(message)
            except grpc.aio.BaseError:
                # The client left, and the cancellation of this call is on its way.
                raise asyncio.CancelledError from None


async def _responses(
    gateway: ServerGateway, message: ProtoMessage, caller: Caller, context: RequestContext
) -> AsyncGenerator[ProtoMessage, None]:
    """The responses to one request, each marked whether it is the last."""
    if gateway.exiting():
        raise ServerExiting(SHUTTING_DOWN)
    model = gateway.acquire(context, message.model_name, parse_version(message.model_version))
    config = model.config
    request, requested, deferred = parse_infer_message(message, gateway.shared_state.shared_memory, caller)
    if deferred:
        request = await decode_deferred(model.validate, request, deferred)
    final = False
    async with aclosing(model.infer(request)) as responses:
        async for response in responses:
            final = response.final or not config.decoupled
            yield mark_final(await write_response_off_loop(config, request.id, response, requested), final)
    if not final and wants_empty_final(message):
        yield mark_final(await write_response_off_loop(config, request.id, InferResponse(()), requested), True)


def _first(error: Exception) -> Exception:
    """The error that ended a task group: errors of the tasks that it cancelled come after."""
    return _first(error.exceptions[0]) if isinstance(error, ExceptionGroup) else error
