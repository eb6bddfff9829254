"""Triton's v2 door over gRPC: the handlers of GRPCInferenceService and of the health service.

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

from ...core.errors import CharoniaError, Exiting, InvalidArgument, Unsupported, cut_off
from ...core.gateway import Gateway
from ..deferred_tensors import decoded
from ..http.error_responses import UNEXPECTED
from ..metadata import ServerInfo, model_metadata, server_metadata
from ..single_response import asks_for_stream, at_most_two, can_answer_once
from .call_policy import Caller, GrpcRules
from .control_rpcs import CONTROLS, Control
from .request_messages import read_call
from .response_messages import Message, read_version, written
from .status import STOPPING, Context, client_id_of, metadata_of, refuse
from .stream_infer import InferStream, refusals

log = logging.getLogger(__name__)

_DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy"
Handler = Callable[[Message, Context], Awaitable[Any]]


def _answering(handler: Handler, name: str, calls: set[asyncio.Task[Any]]) -> Handler:
    """A handler whose errors become the call's status; its task is one of `calls` meanwhile."""

    async def answer(request: Message, context: Context) -> Any:
        task = asyncio.current_task()
        assert task is not None
        calls.add(task)
        try:
            return await handler(request, context)
        except CharoniaError as error:
            # Its frames hold the request, and memory that a client lends: grpc keeps what ends a call for a while.
            refusal = error.with_traceback(None)
        except grpc.aio.BaseError:  # the client is gone
            raise
        except asyncio.CancelledError as cancelled:
            exiting = cut_off(cancelled)
            if exiting is None:
                raise
            refusal = exiting
        except Exception:
            log.exception("%s failed", name)
            refusal = UNEXPECTED
        finally:
            calls.discard(task)
        return await refuse(context, refusal)

    return answer


def _check_message(request: Message | DecodeError) -> None:
    """Raises `InvalidArgument` for what stands in place of a request that could not be read."""
    if isinstance(request, DecodeError):
        raise InvalidArgument(str(request))


class GrpcDoor:
    """The service's methods. `closing` ends the reading of streams; `calls`: the tasks that answer now."""

    def __init__(
        self,
        gateway: Gateway,
        info: ServerInfo,
        closing: asyncio.Event,
        rules: GrpcRules,
        calls: set[asyncio.Task[Any]],
    ) -> None:
        self._gateway = gateway
        self._info = info
        self._closing = closing
        self._rules = rules
        self._calls = calls

    def handlers(self) -> dict[str, Handler]:
        """By their names on the wire."""
        asked = {
            "ServerLive": self._server_live,
            "ServerReady": self._server_ready,
            "ModelReady": self._model_ready,
            "ServerMetadata": self._server_metadata,
            "ModelMetadata": self._model_metadata,
        }
        controls = {name: self._plain(name, control) for name, control in (asked | CONTROLS).items()}
        counted = {"ModelInfer": self._model_infer, "ModelStreamInfer": self._model_stream_infer}
        return {name: _answering(handler, name, self._calls) for name, handler in (controls | counted).items()}

    def _plain(self, name: str, control: Control) -> Handler:
        """A handler for whoever may call it."""

        async def answer(request: Message, context: Context) -> Message:
            self._rules.admit(name, dict(metadata_of(context)))
            _check_message(request)
            return await control(self._gateway, request)

        return answer

    async def _server_live(self, gateway: Gateway, request: Message) -> Message:
        return pb.ServerLiveResponse(live=True)

    async def _server_ready(self, gateway: Gateway, request: Message) -> Message:
        if gateway.exiting():
            raise Exiting
        return pb.ServerReadyResponse(ready=gateway.ready())

    async def _model_ready(self, gateway: Gateway, request: Message) -> Message:
        return pb.ModelReadyResponse(ready=gateway.model_ready(request.name, read_version(request.version)))

    async def _server_metadata(self, gateway: Gateway, request: Message) -> Message:
        return pb.ServerMetadataResponse(**server_metadata(self._info))

    async def _model_metadata(self, gateway: Gateway, request: Message) -> Message:
        version = read_version(request.version)
        config = gateway.model(request.name, version)
        versions = (version,) if version else gateway.versions(request.name)
        return pb.ModelMetadataResponse(**model_metadata(config, versions))

    async def _model_infer(self, request: Message, context: Context) -> Message:
        metadata = metadata_of(context)
        with self._gateway.open("ModelInfer", metadata) as exchange:
            caller = self._rules.caller("ModelInfer", metadata)
            exchange.tenant = caller.tenant.name
            _check_message(request)
            exchange.id, exchange.client_id = request.id, client_id_of(context)
            return await self._infer(request, caller)

    async def _infer(self, request: Message, caller: Caller) -> Message:
        gateway = self._gateway
        if gateway.exiting():
            raise Exiting(STOPPING)
        config = gateway.model(request.model_name, read_version(request.model_version))
        if not can_answer_once(config):
            raise Unsupported(_DECOUPLED)
        asked, wanted, later = read_call(request, gateway.commons.regions, caller)
        if later:
            asked = await decoded(config, asked, later)
        if config.decoupled and asks_for_stream(asked):
            raise Unsupported(f"{_DECOUPLED}: set stream to false, or use ModelStreamInfer", field="stream")
        async with aclosing(gateway.infer(config.name, config.version, asked)) as responses:
            answers = await at_most_two(responses)
        if len(answers) != 1:
            raise Unsupported(_DECOUPLED)
        return await written(config, asked.id, answers[0], wanted)

    async def _model_stream_infer(self, requests: object, context: Context) -> None:
        with refusals(self._gateway, context):
            caller = self._rules.caller("ModelStreamInfer", metadata_of(context))
        await InferStream(self._gateway, context, self._closing, caller).run()


class Health:
    """grpc.health.v1.Health/Check, which tells only whether the server is ready.

    Its two messages are two bytes: written here, they save a dependency.
    """

    _SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def check(self, request: bytes, context: Context) -> bytes:
        return self._SERVING if self._gateway.ready() else self._NOT_SERVING

    def handler(self) -> grpc.GenericRpcHandler:
        method = grpc.unary_unary_rpc_method_handler(self.check)
        return grpc.method_handlers_generic_handler("grpc.health.v1.Health", {"Check": method})
