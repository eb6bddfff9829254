"""Runs the gRPC services on a port that was reserved before: start, serve, stop. Knows no request."""

import asyncio
import socket
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from google.protobuf.message_factory import GetMessageClass  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2

from ...core.errors import ServerExiting, Unavailable
from ...processes import gc_tuning
from ...telemetry.shared_state import ServerGateway
from ..metadata import ServerInfo
from .response_messages import SHUTTING_DOWN
from .servicer import InferenceServicer
from .settings import GrpcCallPolicy, GrpcSettings, RpcContext
from .wire_format import ProtoMessage, check_message_size, deserialize_infer

_LARGEST_MESSAGE = 2**31 - 1
_MAX_CONTROL_BYTES = 1 << 20
"""Bytes of a request that is neither an inference nor a load with files."""

_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"
"""Responses of grpc.health.v1.Health: an enum in field 1."""

_INFERENCE, _LOAD = ("ModelInfer", "ModelStreamInfer"), "RepositoryModelLoad"
_COMPRESSION = {
    "none": None,
    "low": grpc.Compression.Deflate,
    "medium": grpc.Compression.Gzip,
    "high": grpc.Compression.Gzip,
}
_FLUSH_SECONDS = 2
"""How long responses that are written may take to reach their clients when the server stops."""


class GrpcServer:
    """The gRPC endpoint on the port that `sock` reserves, until `stop`; `policy` says which calls are answered."""

    def __init__(
        self,
        gateway: ServerGateway,
        info: ServerInfo,
        settings: GrpcSettings,
        sock: socket.socket,
        policy: GrpcCallPolicy,
    ) -> None:
        self.port: int = sock.getsockname()[1]
        self._address = f"[{settings.address}]" if ":" in settings.address else settings.address
        self._address += f":{self.port}"
        self._gateway, self._info, self._settings = gateway, info, settings
        self._closing = asyncio.Event()
        self._calls: set[asyncio.Task[Any]] = set()
        self._policy = policy
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Return when it listens; raises `Unavailable` if another process took the port."""
        options = [
            ("grpc.max_send_message_length", _LARGEST_MESSAGE),
            ("grpc.max_receive_message_length", self._info.max_raw_size),
            *self._settings.channel_options,
        ]
        self._server = server = grpc.aio.server(options=options, compression=_COMPRESSION[self._settings.compression])
        servicer = InferenceServicer(self._gateway, self._info, self._closing, self._policy, self._calls)
        server.add_generic_rpc_handlers((_inference_service(servicer), _health_service(self._gateway)))
        try:
            if (tls := self._settings.tls) is None:
                server.add_insecure_port(self._address)
            else:
                pairs = [(tls.key, tls.certificate)]
                server.add_secure_port(self._address, grpc.ssl_server_credentials(pairs, tls.root, tls.mutual))
        except RuntimeError as error:
            raise Unavailable(f"cannot open {self._address}: {error} (--grpc-port)") from None
        await server.start()

    async def ended(self) -> None:
        """Return after `stop` was called: the server never ends by itself."""
        await self._closing.wait()

    async def stop(self, force: bool = False) -> None:
        """Refuse new calls, end idle streams and wait for the others; with `force`, these end with `ServerExiting`."""
        self._closing.set()
        if force:
            for call in self._calls:
                call.cancel(ServerExiting(SHUTTING_DOWN))
        if self._server is not None:
            await self._server.stop(_FLUSH_SECONDS)


def _inference_service(servicer: InferenceServicer) -> grpc.GenericRpcHandler:
    """GRPCInferenceService, as the published messages describe it."""
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    handlers, methods = servicer.handlers(), {}
    for method in service.methods:
        stream = method.client_streaming
        answer = grpc.stream_stream_rpc_method_handler if stream else grpc.unary_unary_rpc_method_handler
        write = GetMessageClass(method.output_type).SerializeToString
        methods[method.name] = answer(handlers[method.name], partial(_deserialize, method), write)
    return grpc.method_handlers_generic_handler(service.full_name, methods)


def _deserialize(method: Any, data: bytes) -> ProtoMessage | DecodeError:
    """The request of a call of `method`; memory is given back soon if it is large.

    The handler of a unary call gets the `DecodeError` in place of a message that is none: grpc would log a traceback
    and say that the fault is the server's. Streams are read by their handlers, to which it is raised.
    """
    if len(data) > gc_tuning.LARGE_REQUEST_BYTES:
        gc_tuning.release_memory_soon()
    try:
        if method.name in _INFERENCE:
            return deserialize_infer(data)
        check_message_size(data, _LARGEST_MESSAGE if method.name == _LOAD else _MAX_CONTROL_BYTES)
        return GetMessageClass(method.input_type).FromString(data)
    except DecodeError as error:
        if method.client_streaming:
            raise
        return error


def _health_service(gateway: ServerGateway) -> grpc.GenericRpcHandler:
    """grpc.health.v1.Health, whose Check tells whether the server is ready at the time of the call."""

    async def check(request: bytes, context: RpcContext) -> bytes:
        return _SERVING if gateway.ready() else _NOT_SERVING

    methods = {"Check": grpc.unary_unary_rpc_method_handler(check)}
    return grpc.method_handlers_generic_handler("grpc.health.v1.Health", methods)
