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

from ..core.errors import CharoniaError, InvalidArgument, Unavailable, Unsupported
from ..core.gateway import Gateway
from ..core.model import ModelConfig
from ..core.request import InferRequest
from .faults import UNEXPECTED
from .grpc_control import CONTROLS, Control
from .grpc_faults import STOPPING, Context, metadata_of, refuse
from .grpc_messages import Message, read_version, write_response
from .grpc_requests import read_call
from .grpc_stream import InferStream, refusals
from .keys import NOBODY, Keyring, Tenant
from .metadata import ServerInfo, model_metadata, server_metadata
from .unary import at_most_two

log = logging.getLogger(__name__)

_DECOUPLED = "ModelInfer RPC doesn't support models with decoupled transaction policy"
_TRUE = (True, "true", "True", "TRUE", "1")

_OPEN = ("ServerLive", "ServerReady", "ModelReady")
"""What needs no key."""

_COUNTED = ("ModelInfer", "ModelStreamInfer")
"""What checks key and request by itself: a refusal leaves a record."""

Handler = Callable[[Message, Context], Awaitable[Any]]


def _answering(handler: Handler, name: str) -> Handler:
    """A handler whose errors become the call's status."""

    async def answer(request: Message, context: Context) -> Any:
        try:
            return await handler(request, context)
        except CharoniaError as error:
            await refuse(context, error)
        except grpc.aio.BaseError:  # the client is gone
            raise
        except Exception:
            log.exception("%s failed", name)
            await refuse(context, UNEXPECTED)

    return answer


def _check_message(request: Message | DecodeError) -> None:
    """Raises `InvalidArgument` for what stands in place of a request that could not be read."""
    if isinstance(request, DecodeError):
        raise InvalidArgument(str(request))


class GrpcDoor:
    """The service's methods. `closing` ends the reading of streams."""

    def __init__(self, gateway: Gateway, info: ServerInfo, closing: asyncio.Event, keys: Keyring) -> None:
        self._gateway = gateway
        self._info = info
        self._closing = closing
        self._keys = keys

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
        return {name: _answering(handler, name) for name, handler in (controls | counted).items()}

    def _plain(self, name: str, control: Control) -> Handler:
        """A handler for those who show a key, if it needs one."""

        async def answer(request: Message, context: Context) -> Message:
            if name not in _OPEN:
                self._tenant_of(context)
            _check_message(request)
            return await control(self._gateway, request)

        return answer

    def _tenant_of(self, context: Context) -> Tenant:
        """Who calls.

        Raises:
            Unauthenticated: his key is missing or wrong.
        """
        return self._keys.tenant(dict(metadata_of(context)).get("authorization")) if self._keys else NOBODY

    async def _server_live(self, gateway: Gateway, request: Message) -> Message:
        return pb.ServerLiveResponse(live=True)

    async def _server_ready(self, gateway: Gateway, request: Message) -> Message:
        if gateway.exiting():
            raise Unavailable("Server exiting")
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
        with self._gateway.open("ModelInfer", metadata_of(context)) as exchange:
            tenant = self._tenant_of(context)
            exchange.tenant = tenant.name
            _check_message(request)
            exchange.id = request.id
            return await self._infer(request, tenant)

    async def _infer(self, request: Message, tenant: Tenant) -> Message:
        gateway = self._gateway
        if gateway.exiting():
            raise Unavailable(STOPPING)
        config = gateway.model(request.model_name, read_version(request.model_version))
        asked, wanted = read_call(request, gateway.commons.regions, tenant)
        _refuse_streaming(config, asked)
        async with aclosing(gateway.infer(config.name, config.version, asked)) as responses:
            answers = await at_most_two(responses)
        if len(answers) != 1:
            raise Unsupported(_DECOUPLED)
        return write_response(config, asked.id, answers[0], wanted)

    async def _model_stream_infer(self, requests: object, context: Context) -> None:
        with refusals(self._gateway, context):
            tenant = self._tenant_of(context)
        await InferStream(self._gateway, context, self._closing, tenant).run()


def _refuse_streaming(config: ModelConfig, asked: InferRequest) -> None:
    """A decoupled model answers here only if it can be asked for one response, and is."""
    if not config.decoupled:
        return
    if not any(spec.name == "stream" and spec.datatype == "BOOL" for spec in config.inputs):
        raise Unsupported(_DECOUPLED)
    stream, parameters = asked.inputs.get("stream"), asked.parameters
    said = parameters.get("stream", parameters.get("streaming", False)) in _TRUE
    if said if stream is None else bool(stream.data.any()):
        raise Unsupported(f"{_DECOUPLED}: set stream to false, or use ModelStreamInfer", field="stream")


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
