"""Requests and calls that a worker forwards to the hub, whose endpoints answer them: all that is no inference."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Scope

from ..api.grpc.control_rpcs import CONTROL_RPCS, BoundRpc, server_live, server_ready
from ..api.http.connection import CLIENT_LEFT, CancelOnDisconnect, ClientDisconnected, receive_body
from ..api.http.request_context import tenant_of
from ..api.size_limits import json_too_large
from .hub_connection import HubConnection
from .messages import HttpCall
from .pieces import ForwardedInPieces
from .remote_gateway import RemoteGateway


class HttpForwarder:
    """Answers requests with what the hub answers. `max_size`: of a body, in bytes."""

    def __init__(self, hub: HubConnection, max_size: int) -> None:
        self._hub, self._max_size = hub, max_size

    async def answer(self, request: Request) -> ASGIApp:
        body = b""
        if request.method != "GET":
            announced = request.headers.get("content-length", "").encode()
            body = bytes(await receive_body(request, announced, self._max_size, json_too_large))
        try:
            async with CancelOnDisconnect(request.receive):
                answer = await self._hub.ask_http(partial(_call, request.scope, body, False))
        except ClientDisconnected:
            return Response(status_code=CLIENT_LEFT)
        response = Response(answer.body, answer.status)
        response.raw_headers = answer.headers
        return response

    async def answer_in_pieces(self, request: Request) -> ASGIApp:
        """Answer as `answer` does, where bodies may be long, or be made while they are read."""
        return ForwardedInPieces(self._hub, partial(_call, request.scope, b"", True))


def _call(scope: Scope, body: bytes, in_pieces: bool, key: int) -> HttpCall:
    tenant = tenant_of(scope)
    target = scope["path"], scope["query_string"], [*scope["headers"]]
    return HttpCall(key, scope["method"], *target, body, tenant.name, tenant.weight, in_pieces)


def forwarded_rpcs(gateway: RemoteGateway) -> Mapping[str, BoundRpc]:
    """The control RPCs of a worker, by their names."""

    async def ask(name: str, request: Any) -> dict[str, Any]:
        return dict(await gateway.connection.ask_grpc(name, request.SerializeToString()))

    forwarded = {name: partial(ask, name) for name in CONTROL_RPCS}
    # Whose answer is also that of the process that is asked.
    return {**forwarded, "ServerLive": partial(server_live, gateway), "ServerReady": partial(server_ready, gateway)}


async def answer_rpc(rpcs: Mapping[str, BoundRpc], name: str, message: bytes) -> dict[str, Any]:
    """The fields of the response to a control RPC, made in the hub by its own. Raises `CharoniaError`."""
    from tritonclient.grpc import service_pb2

    request = getattr(service_pb2, f"{name}Request").FromString(message)
    return await rpcs[name](request) or {}
