"""Runs the gRPC services on a port that was reserved before: GRPCInferenceService of KServe's v2 protocol, with
Triton's extensions, grpc.health.v1.Health, and where it is asked for grpc.reflection.v1alpha.ServerReflection.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
from google.protobuf.json_format import ParseDict  # type: ignore[import-untyped]
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from google.protobuf.message_factory import GetMessageClass  # type: ignore[import-untyped]
from tritonclient.grpc import service_pb2

from ...core.errors import CharoniaError, ServerExiting, Unavailable, shutdown_error
from ...core.gateway import ModelLookup
from ...core.native_calls import CONTROL_FLOW
from ...processes import gc_tuning
from ...telemetry.shared_state import ServerLookup
from ..http.error_responses import unexpected_error
from ..metadata import ServerInfo, server_metadata
from ..tls import ChangedFiles, TlsFiles
from .control_rpcs import BoundRpc
from .inference_rpcs import answer_now, model_infer, model_stream_infer
from .known_requests import KnownRequests
from .messages import SHUTTING_DOWN, abort_call, check_message
from .reflection import serve_reflection
from .settings import GrpcCallPolicy, GrpcSettings, RpcContext, call_metadata
from .wire_format import ProtoMessage, check_message_size

log = logging.getLogger(__name__)

RpcHandler = Callable[[ProtoMessage, RpcContext], Awaitable[Any]]

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
"""Seconds for written responses to reach their clients when the server stops."""


class GrpcServer:
    """The gRPC endpoint on the port that `sock` reserves, until `stop`; `policy` says which calls are answered, and
    `control_rpcs`, by their names, answer those that are no inference."""

    def __init__(
        self,
        lookup: ServerLookup,
        info: ServerInfo,
        settings: GrpcSettings,
        sock: socket.socket,
        policy: GrpcCallPolicy,
        control_rpcs: Mapping[str, BoundRpc],
    ) -> None:
        self.port: int = sock.getsockname()[1]
        self._address = f"[{settings.address}]" if ":" in settings.address else settings.address
        self._address += f":{self.port}"
        self._lookup = lookup
        self._info = info
        self._settings = settings
        self._closing = asyncio.Event()
        self._calls: set[asyncio.Task[Any]] = set()
        self._policy = replace(policy, max_response_size=info.max_response_size)
        self._control_rpcs = control_rpcs
        self._known_requests = KnownRequests()
        self._server: grpc.aio.Server | None = None

    async def start(self) -> None:
        """Return when it listens; raises `Unavailable` if another process took the port."""
        options = [
            ("grpc.max_send_message_length", _LARGEST_MESSAGE),
            ("grpc.max_receive_message_length", self._info.max_raw_size),
            *self._settings.channel_options,
        ]
        self._server = server = grpc.aio.server(options=options, compression=_COMPRESSION[self._settings.compression])
        server.add_generic_rpc_handlers((self._inference_service(), _health_service(self._lookup)))
        if self._settings.reflection:
            serve_reflection(server)
        try:
            if (tls := self._settings.tls) is None:
                server.add_insecure_port(self._address)
            else:
                server.add_secure_port(self._address, _renewed_credentials(tls))
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

    def _inference_service(self) -> grpc.GenericRpcHandler:
        """GRPCInferenceService, as the published messages describe it."""

        async def describe_server(request: ProtoMessage) -> dict[str, Any]:
            return server_metadata(self._info)

        async def stream(requests: object, context: RpcContext) -> None:
            await model_stream_infer(self._lookup, self._policy, context, self._closing)

        controls = {"ServerMetadata": describe_server, **self._control_rpcs}
        handlers = {name: self._control(name, rpc) for name, rpc in controls.items()}
        handlers |= {"ModelInfer": partial(model_infer, self._lookup, self._policy), "ModelStreamInfer": stream}
        service, methods = service_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"], {}
        for method in service.methods:
            many = method.client_streaming
            new_handler = grpc.stream_stream_rpc_method_handler if many else grpc.unary_unary_rpc_method_handler
            now = partial(answer_now, self._lookup, self._policy) if method.name == "ModelInfer" else _never
            answer = self._answering(handlers[method.name], method.name, now)
            parse = self._known_requests.read if method.name in _INFERENCE else partial(_parse_control, method)
            read = partial(_deserialize, parse, method.client_streaming)
            methods[method.name] = new_handler(answer, read, _serialize)
        return grpc.method_handlers_generic_handler(service.full_name, methods)

    def _control(self, name: str, rpc: BoundRpc) -> RpcHandler:
        """The handler of an RPC that leaves no record of a request."""
        new_response = getattr(service_pb2, f"{name}Response")

        async def answer(request: ProtoMessage, context: RpcContext) -> ProtoMessage:
            self._policy.authorize(name, dict(call_metadata(context)))
            check_message(request)
            return ParseDict(await rpc(request) or {}, new_response())

        return answer

    def _answering(self, handler: RpcHandler, name: str, now: Callable[[ProtoMessage, RpcContext], Any]) -> RpcHandler:
        """The handler, for requests that `now` has no answer to, with its errors turned into the call's status, and its
        task among the open calls."""

        async def answer(request: ProtoMessage, context: RpcContext) -> Any:
            task = None
            try:
                answered = now(request, context)
                if answered is not None:
                    return answered
                task = asyncio.current_task()
                assert task is not None
                self._calls.add(task)
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
            except CONTROL_FLOW:
                raise
            except BaseException as error:
                log.exception("%s failed", name)
                refusal = unexpected_error(error)
            finally:
                if task is not None:
                    self._calls.discard(task)
            return await abort_call(context, refusal)

        return answer


def _renewed_credentials(tls: TlsFiles) -> grpc.ServerCredentials:
    """Credentials that are asked for with each handshake whether they have changed."""
    renewed: list[TlsFiles] = []

    def configuration(files: TlsFiles) -> Any:
        return grpc.ssl_server_certificate_configuration([(files.key, files.certificate)], files.root)

    changed = ChangedFiles([path for path in tls.paths if path is not None], lambda: renewed.append(tls.read_again()))

    def fetch() -> Any:
        changed.look()
        return configuration(renewed.pop()) if renewed else None

    return grpc.dynamic_ssl_server_credentials(configuration(tls), fetch, tls.mutual)


def _serialize(message: ProtoMessage | bytes) -> bytes:
    """A response; those of models are encoded already."""
    encoded: bytes = message if isinstance(message, bytes) else message.SerializeToString()
    return encoded


def _never(request: ProtoMessage, context: RpcContext) -> None: ...


def _deserialize(parse: Callable[[bytes], Any], streams: bool, data: bytes) -> Any:
    """What `parse` makes of the request of a call, or the `DecodeError` of bytes that are none, which a unary handler
    answers.

    grpc would log a traceback of that error, and say that the server is at fault. To a stream's handler, which reads by
    itself, it is raised. Memory is given back soon after a large message.
    """
    if len(data) > gc_tuning.LARGE_REQUEST_BYTES:
        gc_tuning.release_memory_soon()
    try:
        return parse(data)
    except DecodeError as error:
        if streams:
            raise
        return error


def _parse_control(method: Any, data: bytes) -> ProtoMessage:
    check_message_size(data, _LARGEST_MESSAGE if method.name == _LOAD else _MAX_CONTROL_BYTES)
    return GetMessageClass(method.input_type).FromString(data)


def _health_service(lookup: ModelLookup) -> grpc.GenericRpcHandler:
    """grpc.health.v1.Health, whose Check tells whether the server is ready at the time of the call."""

    async def check(request: bytes, context: RpcContext) -> bytes:
        return _SERVING if lookup.ready() else _NOT_SERVING

    methods = {"Check": grpc.unary_unary_rpc_method_handler(check)}
    return grpc.method_handlers_generic_handler("grpc.health.v1.Health", methods)
