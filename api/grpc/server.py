"""Runs the gRPC door on a port: bind early, serve, stop. Knows its options; not what the door answers."""

import asyncio
import socket
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import grpc
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from google.protobuf.message_factory import GetMessageClass  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2

from ...cli.grpc_options import GrpcOptions
from ...cli.server_options import is_true
from ...core.errors import ServerExiting, Unavailable
from ...core.gateway import Gateway
from ...processes import gc_tuning
from ..metadata import ServerInfo
from .call_policy import GrpcCallPolicy
from .servicer import HealthServicer, InferenceServicer, RpcHandler
from .status import SHUTTING_DOWN
from .tls_files import load_tls_files
from .wire_format import bounded_deserializer, deserialize_infer

_LARGEST_MESSAGE = 2**31 - 1
_LARGEST_QUESTION = 1 << 20
"""Bytes of what is no inference, and no load with files."""

_INFERENCE, _LOAD = ("ModelInfer", "ModelStreamInfer"), "RepositoryModelLoad"
_COMPRESSION = {
    "none": None,
    "low": grpc.Compression.Deflate,
    "medium": grpc.Compression.Gzip,
    "high": grpc.Compression.Gzip,
}
_FLUSH_SECONDS = 2
"""How long responses that are written may take to reach their clients at the very end."""


class GrpcServer:
    """The door on the port that `sock` reserves, until `stop`, for those whom `rules` let in.

    Raises:
        InvalidArgument: the TLS options do not fit together, or a file of theirs is no good.
    """

    def __init__(
        self,
        gateway: Gateway,
        info: ServerInfo,
        options: GrpcOptions,
        sock: socket.socket,
        rules: GrpcCallPolicy,
    ) -> None:
        self.port: int = sock.getsockname()[1]
        self._address = _joined(options.grpc_address, self.port)
        self._credentials = credentials(options)
        self._gateway, self._info, self._options = gateway, info, options
        self._closing = asyncio.Event()
        self._calls: set[asyncio.Task[Any]] = set()
        self._rules = rules
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Return when it listens.

        Raises:
            Unavailable: someone else took the port.
        """
        compression = _COMPRESSION[self._options.grpc_infer_response_compression_level]
        settings = _channel_options(self._options, self._info.max_raw_size)
        self._server = server = grpc.aio.server(options=settings, compression=compression)
        door = InferenceServicer(self._gateway, self._info, self._closing, self._rules, self._calls)
        server.add_generic_rpc_handlers((_service(door.handlers()), HealthServicer(self._gateway).handler()))
        try:
            self._open(server)
        except RuntimeError as error:
            raise Unavailable(f"cannot open {self._address}: {error} (--grpc-port)") from None
        await server.start()

    def _open(self, server: grpc.aio.Server) -> None:
        if self._credentials is None:
            server.add_insecure_port(self._address)
        else:
            server.add_secure_port(self._address, self._credentials)

    async def ended(self) -> None:
        """Return when it was told to stop: of itself it never does."""
        await self._closing.wait()

    async def stop(self, force: bool = False) -> None:
        """Refuse new calls and end idle streams; with `force`, what still runs is answered with that, or cancelled."""
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
    """The handler of a single request gets the `DecodeError` in place of one that is no message of its kind.

    grpc itself would log a traceback and say that the fault is ours. Streams read for themselves.
    """
    read, write = GetMessageClass(method.input_type).FromString, GetMessageClass(method.output_type).SerializeToString
    if method.name in _INFERENCE:
        read = deserialize_infer
    else:
        read = bounded_deserializer(read, _LARGEST_MESSAGE if method.name == _LOAD else _LARGEST_QUESTION)
    read = _noted(read)
    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(handler, read, write)
    return grpc.unary_unary_rpc_method_handler(handler, _or_error(read), write)


def _noted(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    """Memory is given back after a large message, whatever becomes of it."""

    def attempt(data: bytes) -> Any:
        if len(data) > gc_tuning.LARGE_REQUEST_BYTES:
            gc_tuning.release_memory_soon()
        return read(data)

    return attempt


def _or_error(read: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def attempt(data: bytes) -> Any:
        try:
            return read(data)
        except DecodeError as error:
            return error

    return attempt


def _joined(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def _channel_options(options: GrpcOptions, largest: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.so_reuseport", int(is_true(options.reuse_grpc_port))),  # grpc's own default is to share
        ("grpc.max_send_message_length", _LARGEST_MESSAGE),
        ("grpc.max_receive_message_length", largest),
        ("grpc.keepalive_time_ms", options.grpc_keepalive_time),
        ("grpc.keepalive_timeout_ms", options.grpc_keepalive_timeout),
        ("grpc.keepalive_permit_without_calls", int(is_true(options.grpc_keepalive_permit_without_calls))),
        ("grpc.http2.max_pings_without_data", options.grpc_http2_max_pings_without_data),
        ("grpc.http2.min_ping_interval_without_data_ms", options.grpc_http2_min_recv_ping_interval_without_data),
        ("grpc.http2.max_ping_strikes", options.grpc_http2_max_ping_strikes),
        *_ages(options),
    ]


def _ages(options: GrpcOptions) -> Iterator[tuple[str, int]]:
    if options.grpc_max_connection_age:
        yield "grpc.max_connection_age_ms", options.grpc_max_connection_age
    if options.grpc_max_connection_age_grace:
        yield "grpc.max_connection_age_grace_ms", options.grpc_max_connection_age_grace


def credentials(options: GrpcOptions) -> grpc.ServerCredentials | None:
    """What TLS needs; None without it. Raises as `load_tls_files` does."""
    files = load_tls_files(options)
    if files is None:
        return None
    return grpc.ssl_server_credentials([(files.key, files.certificate)], files.root, options.mutual)
