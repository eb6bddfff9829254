"""Runs the gRPC services on a port that was reserved before: start, serve, stop. Knows no request."""

import asyncio
import socket
from collections.abc import Callable, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from google.protobuf.message_factory import GetMessageClass  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2

from ...core.errors import ServerExiting, Unavailable
from ...processes import gc_tuning
from ...telemetry.shared_state import ServerGateway
from ..metadata import ServerInfo
from .call_policy import GrpcCallPolicy
from .servicer import HealthServicer, InferenceServicer, RpcHandler
from .settings import GrpcSettings
from .status import SHUTTING_DOWN
from .wire_format import bounded_deserializer, deserialize_infer

_LARGEST_MESSAGE = 2**31 - 1
_MAX_CONTROL_BYTES = 1 << 20
"""Bytes of a request that is neither an inference nor a load with files."""

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
        """Return when it listens.

        Raises:
            Unavailable: another process took the port.
        """
        options = [
            ("grpc.max_send_message_length", _LARGEST_MESSAGE),
            ("grpc.max_receive_message_length", self._info.max_raw_size),
            *self._settings.channel_options,
        ]
        self._server = server = grpc.aio.server(options=options, compression=_COMPRESSION[self._settings.compression])
        servicer = InferenceServicer(self._gateway, self._info, self._closing, self._policy, self._calls)
        server.add_generic_rpc_handlers((_service(servicer.handlers()), HealthServicer(self._gateway).handler()))
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


def _service(handlers: Mapping[str, RpcHandler]) -> grpc.GenericRpcHandler:
    """GRPCInferenceService, as the published messages describe it, answered by `handlers`."""
    service = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
    methods = {method.name: _method(method, handlers[method.name]) for method in service.methods}
    return grpc.method_handlers_generic_handler(service.full_name, methods)


def _method(method: Any, handler: RpcHandler) -> grpc.RpcMethodHandler:
    read, write = GetMessageClass(method.input_type).FromString, GetMessageClass(method.output_type).SerializeToString
    if method.name in _INFERENCE:
        read = deserialize_infer
    else:
        read = bounded_deserializer(read, _LARGEST_MESSAGE if method.name == _LOAD else _MAX_CONTROL_BYTES)
    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(handler, _deserializer(read, False), write)
    return grpc.unary_unary_rpc_method_handler(handler, _deserializer(read, True), write)


def _deserializer(read: Callable[[bytes], Any], unary: bool) -> Callable[[bytes], Any]:
    """`read`, after which memory is given back if the message was large.

    The handler of a `unary` call gets the `DecodeError` in place of a message that is none: grpc would log a traceback
    and say that the fault is the server's. Streams are read by their handlers, to which it is raised.
    """

    def deserialize(data: bytes) -> Any:
        if len(data) > gc_tuning.LARGE_REQUEST_BYTES:
            gc_tuning.release_memory_soon()
        try:
            return read(data)
        except DecodeError as error:
            if unary:
                return error
            raise

    return deserialize
