"""GRPCInferenceService of KServe's v2 protocol, with Triton's extensions, and grpc.health.v1.Health.

Translates between the protocol and the gateway; decides nothing.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2 as pb

from ...core.errors import CharoniaError, InvalidArgument, ServerExiting, Unsupported, shutdown_error
from ...telemetry.shared_state import ServerGateway
from ..deferred_tensors import decode_deferred
from ..http.error_responses import INTERNAL_SERVER_ERROR
from ..metadata import ServerInfo, model_metadata, server_metadata
from ..single_response import read_up_to_two, supports_single_response, wants_stream
from .call_policy import GrpcCallPolicy
from .control_rpcs import CONTROL_RPCS, ControlRpc
from .request_messages import parse_infer_message
from .response_messages import ProtoMessage, parse_version, write_response_off_loop
from .status import SHUTTING_DOWN, RpcContext, abort_call, call_metadata, client_request_id
from .stream_infer import StreamInferCall, recorded_refusals

log = logging.getLogger(__name__)

_DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy"
RpcHandler = Callable[[ProtoMessage, RpcContext], Awaitable[Any]]


def _answering(handler: RpcHandler, name: str, calls: set[asyncio.Task[Any]]) -> RpcHandler:
    """The handler with its errors turned into the call's status; while it runs, its task is one of `calls`."""

    async def answer(request: ProtoMessage, context: RpcContext) -> Any:
        task = asyncio.current_task()
        assert task is not None
        calls.add(task)
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
            calls.discard(task)
        return await abort_call(context, refusal)

    return answer


def _check_message(request: ProtoMessage | DecodeError) -> None:
    """Raise `InvalidArgument` for the error that stands in place of a request that could not be deserialized."""
    if isinstance(request, DecodeError):
        raise InvalidArgument(str(request))


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
        queries = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
        }
        controls = {name: self._uncounted(name, control) for name, control in (queries | CONTROL_RPCS).items()}
        inference = {"ModelInfer": self._model_infer, "ModelStreamInfer": self._model_stream_infer}
        return {name: _answering(handler, name, self._calls) for name, handler in (controls | inference).items()}

    def _uncounted(self, name: str, control: ControlRpc) -> RpcHandler:
        """The handler of an RPC that leaves no record of a request."""

        async def answer(request: ProtoMessage, context: RpcContext) -> ProtoMessage:
            self._policy.authorize(name, dict(call_metadata(context)))
            _check_message(request)
            return await control(self._gateway, request)

        return answer

    async def _server_live(self, gateway: ServerGateway, request: ProtoMessage) -> ProtoMessage:
        return pb.ServerLiveResponse(live=True)

    async def _server_ready(self, gateway: ServerGateway, request: ProtoMessage) -> ProtoMessage:
        if gateway.exiting():
            raise ServerExiting
        return pb.ServerReadyResponse(ready=gateway.ready())

    async def _model_ready(self, gateway: ServerGateway, request: ProtoMessage) -> ProtoMessage:
        return pb.ModelReadyResponse(ready=gateway.is_model_ready(request.name, parse_version(request.version)))

    async def _server_metadata(self, gateway: ServerGateway, request: ProtoMessage) -> ProtoMessage:
        return pb.ServerMetadataResponse(**server_metadata(self._info))

    async def _model_metadata(self, gateway: ServerGateway, request: ProtoMessage) -> ProtoMessage:
        version = parse_version(request.version)
        config = gateway.model_config(request.name, version)
        versions = (version,) if version else gateway.served_versions(request.name)
        return pb.ModelMetadataResponse(**model_metadata(config, versions))

    async def _model_infer(self, message: ProtoMessage, rpc: RpcContext) -> ProtoMessage:
        gateway, metadata = self._gateway, call_metadata(rpc)
        with gateway.open_request("ModelInfer", metadata) as context:
            caller = self._policy.identify_caller("ModelInfer", metadata)
            context.tenant, context.tenant_weight = caller.tenant
            _check_message(message)
            context.id, context.client_id = message.id, client_request_id(rpc)
            if gateway.exiting():
                raise ServerExiting(SHUTTING_DOWN)
            model = gateway.acquire(context, message.model_name, parse_version(message.model_version))
            config = model.config
            if not supports_single_response(config):
                raise Unsupported(_DECOUPLED)
            request, requested, deferred = parse_infer_message(message, gateway.shared_state.shared_memory, caller)
            if deferred:
                request = await decode_deferred(model.validate, request, deferred)
            if config.decoupled and wants_stream(request):
                raise Unsupported(f"{_DECOUPLED}: set stream to false, or use ModelStreamInfer", field="stream")
            async with aclosing(model.infer(request)) as stream:
                responses = await read_up_to_two(stream)
            if len(responses) != 1:
                raise Unsupported(_DECOUPLED)
            return await write_response_off_loop(config, request.id, responses[0], requested)

    async def _model_stream_infer(self, requests: object, context: RpcContext) -> None:
        with recorded_refusals(self._gateway, context):
            caller = self._policy.identify_caller("ModelStreamInfer", call_metadata(context))
        await StreamInferCall(self._gateway, context, self._closing, caller).run()


class HealthServicer:
    """grpc.health.v1.Health/Check, which tells whether the server is ready at the time of the call.

    A response is two bytes: an enum in field 1.
    """

    _SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"

    def __init__(self, gateway: ServerGateway) -> None:
        self._gateway = gateway

    async def check(self, request: bytes, context: RpcContext) -> bytes:
        return self._SERVING if self._gateway.ready() else self._NOT_SERVING

    def handler(self) -> grpc.GenericRpcHandler:
        method = grpc.unary_unary_rpc_method_handler(self.check)
        return grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": method})
