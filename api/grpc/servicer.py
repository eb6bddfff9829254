"""GRPCInferenceService of KServe's v2 protocol, with Triton's extensions.

Translates between the protocol and the gateway; decides nothing.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2 as pb

from ...core.errors import CharoniaError, InvalidArgument, ServerExiting, Unsupported, shutdown_error
from ...telemetry.shared_state import ServerGateway
from ..http.error_responses import INTERNAL_SERVER_ERROR
from ..infer_call import read_up_to_two, supports_single_response, wants_stream
from ..metadata import ServerInfo, server_metadata
from .control_rpcs import CONTROL_RPCS, ControlRpc
from .request_messages import parse_infer_message, parse_version
from .response_messages import SHUTTING_DOWN, abort_call, write_response_off_loop
from .settings import GrpcCallPolicy, RpcContext, call_metadata
from .stream_infer import RPC_NAME, StreamInferCall
from .wire_format import ProtoMessage

log = logging.getLogger(__name__)

_DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy"
RpcHandler = Callable[[ProtoMessage, RpcContext], Awaitable[Any]]


class InferenceServicer:
    """The methods of GRPCInferenceService. `closing` ends the reading of streams; `calls`: the tasks of open calls."""

    def __init__(
        self,
        gateway: ServerGateway,
        info: ServerInfo,
        closing: asyncio.Event,
        policy: GrpcCallPolicy,
        calls: set[asyncio.Task[Any]],
    ) -> None:
        self._gateway = gateway
        self._info = info
        self._closing = closing
        self._policy = policy
        self._calls = calls

    def handlers(self) -> dict[str, RpcHandler]:
        """The handlers of all RPCs, by the names of these."""

        async def describe_server(gateway: ServerGateway, request: ProtoMessage) -> dict[str, Any]:
            return server_metadata(self._info)

        controls = {"ServerMetadata": describe_server, **CONTROL_RPCS}
        handlers = {name: self._control(name, rpc) for name, rpc in controls.items()}
        handlers |= {"ModelInfer": self._model_infer, RPC_NAME: self._model_stream_infer}
        return {name: self._answering(handler, name) for name, handler in handlers.items()}

    def _answering(self, handler: RpcHandler, name: str) -> RpcHandler:
        """The handler with its errors turned into the call's status, and its task among the open calls."""

        async def answer(request: ProtoMessage, context: RpcContext) -> Any:
            task = asyncio.current_task()
            assert task is not None
            self._calls.add(task)
            try:
                return await handler(request, context)
            except CharoniaError as error:
                # The frames hold the request, and memory that a client lends: grpc keeps what ends a call for a while.
                refusal = error.with_traceback(None)
            except grpc.aio.BaseError:  # the client is gone
                raise
            except asyncio.CancelledError as cancelled:
                exiting = shutdown_error(cancelled)
                if exiting is None:
                    raise
                refusal = exiting
            except Exception:
                log.exception("%s failed", name)
                refusal = INTERNAL_SERVER_ERROR
            finally:
                self._calls.discard(task)
            return await abort_call(context, refusal)

        return answer

    def _control(self, name: str, rpc: ControlRpc) -> RpcHandler:
        """The handler of an RPC that leaves no record of a request."""
        new_response = getattr(pb, f"{name}Response")

        async def answer(request: ProtoMessage, context: RpcContext) -> ProtoMessage:
            self._policy.authorize(name, dict(call_metadata(context)))
            _check_message(request)
            return ParseDict(await rpc(self._gateway, request), new_response())

        return answer

    async def _model_infer(self, message: ProtoMessage, rpc: RpcContext) -> ProtoMessage:
        gateway, metadata = self._gateway, call_metadata(rpc)
        with gateway.open_request("ModelInfer", metadata) as context:
            caller = self._policy.identify_caller("ModelInfer", metadata)
            caller.note_in(context)
            _check_message(message)
            context.id = message.id
            if gateway.exiting():
                raise ServerExiting(SHUTTING_DOWN)
            model = gateway.acquire(context, message.model_name, parse_version(message.model_version))
            config = model.config
            if not supports_single_response(config):
                raise Unsupported(_DECOUPLED)
            call = parse_infer_message(message, gateway.shared_state.shared_memory, caller)
            if call.deferred:
                call = await call.decode_deferred(model)
            if config.decoupled and wants_stream(call.request):
                raise Unsupported(f"{_DECOUPLED}: set stream to false, or use ModelStreamInfer", field="stream")
            async with aclosing(model.infer(call.request)) as stream:
                responses = await read_up_to_two(stream)
            if len(responses) != 1:
                raise Unsupported(_DECOUPLED)
            return await write_response_off_loop(config, call, responses[0])

    async def _model_stream_infer(self, requests: object, context: RpcContext) -> None:
        metadata = call_metadata(context)
        try:
            caller = self._policy.identify_caller(RPC_NAME, metadata)
        except CharoniaError:
            with self._gateway.open_request(RPC_NAME, metadata):
                raise
        await StreamInferCall(self._gateway, context, self._closing, caller).run()


def _check_message(request: ProtoMessage | DecodeError) -> None:
    """Raise `InvalidArgument` for the error that stands in place of a request that could not be deserialized."""
    if isinstance(request, DecodeError):
        raise InvalidArgument(str(request))
