"""A request that comes from another process of this server, which has read it from its client and checked the key: the
application answers it as it does its own, but for what stands around it."""

import asyncio
import logging
from typing import NamedTuple

from starlette.types import ASGIApp, Message

from ...core.native_calls import CONTROL_FLOW
from ..api_keys import Tenant
from .error_responses import INTERNAL_SERVER_ERROR, error_response
from .request_context import control_scope

log = logging.getLogger(__name__)


class ControlRequest(NamedTuple):
    """A request with its whole body."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


class ControlResponse(NamedTuple):
    """Its response with its whole body."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


async def ask_app(app: ASGIApp, request: ControlRequest, tenant: str, weight: float) -> ControlResponse:
    """The response of `app` to a client of this tenant. Never raises but for the cancellation of the task that waits:
    then the client has left."""
    scope = control_scope(request.method, request.path, request.query, request.headers, Tenant(tenant, weight))
    unread: list[Message] = [{"type": "http.request", "body": request.body, "more_body": False}]
    sent: list[Message] = []

    async def receive() -> Message:
        return unread.pop() if unread else await stays_connected()

    async def send(message: Message) -> None:
        sent.append(message)

    try:
        await app(scope, receive, send)
    except CONTROL_FLOW:
        raise
    except BaseException:
        log.exception("%s %s failed", request.method, request.path)
        sent.clear()
        await error_response(INTERNAL_SERVER_ERROR, request.path)(scope, receive, send)
    body = b"".join(each.get("body", b"") for each in sent[1:])
    return ControlResponse(sent[0]["status"], [(bytes(name), bytes(value)) for name, value in sent[0]["headers"]], body)


async def stays_connected() -> Message:
    """What is received from a client that has sent its body, and does not leave: nothing."""
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]
