"""Requests that no connection of this process brought: another process of this server has read them from its client,
or the server makes them of its own endpoints for a client who does not wait."""

import asyncio
import logging
from typing import Any, NamedTuple
from uuid import uuid4

from starlette.requests import Request
from starlette.types import ASGIApp, Message

from ...core.errors import CharoniaError
from ...core.extension_contracts import EndpointFunction
from ...core.gateway import ModelLookup
from ...core.native_calls import CONTROL_FLOW
from ..api_keys import Tenant
from .error_responses import INTERNAL_SERVER_ERROR, error_response
from .request_context import LONGEST_WARNING, control_scope, endpoint_name, internal_scope

log = logging.getLogger(__name__)


async def stays_connected() -> Message:
    """Never returns: a client that has sent its body, and does not leave, sends nothing more."""
    return await asyncio.get_running_loop().create_future()  # type: ignore[no-any-return]


class LocalClient:
    """ASGI's `receive` and `send` of a client that has sent its whole body and does not leave; keeps the response."""

    def __init__(self, body: bytes) -> None:
        self._unread: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        self._sent: list[Message] = []

    async def receive(self) -> Message:
        return self._unread.pop() if self._unread else await stays_connected()

    async def send(self, message: Message) -> None:
        self._sent.append(message)

    async def refuse(self, error: CharoniaError, path: str) -> None:
        """Let the response be this error, whatever was sent before; `path`: what was asked."""
        self._sent.clear()
        await error_response(error, path)({"type": "http"}, self.receive, self.send)

    @property
    def status(self) -> int:
        status: int = self._sent[0]["status"]
        return status

    @property
    def headers(self) -> list[tuple[bytes, bytes]]:
        return [(bytes(name), bytes(value)) for name, value in self._sent[0]["headers"]]

    @property
    def body(self) -> bytes:
        return b"".join(message.get("body", b"") for message in self._sent[1:])


class ControlRequest(NamedTuple):
    """A request with its whole body."""

    method: str
    path: str
    query: bytes
    headers: list[tuple[bytes, bytes]]
    body: bytes


class ControlResponse(NamedTuple):
    """A response with its whole body."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


async def ask_app(app: ASGIApp, request: ControlRequest, tenant: Tenant) -> ControlResponse:
    """The response of `app` to a client of this tenant, whose key another process has checked.

    Never raises but for the cancellation of the task that waits: then the client has left.
    """
    client = LocalClient(request.body)
    scope = control_scope(request.method, request.path, request.query, request.headers, tenant)
    try:
        await app(scope, client.receive, client.send)
    except CONTROL_FLOW:
        raise
    except BaseException:
        log.exception("%s %s failed", request.method, request.path)
        await client.refuse(INTERNAL_SERVER_ERROR, request.path)
    return ControlResponse(client.status, client.headers, client.body)


class InternalAnswer(NamedTuple):
    """The answer of an endpoint to the server itself."""

    status: int
    body: bytes
    request_id: str
    error: CharoniaError | None = None
    """The error that the endpoint raised, if it did."""
    begun: bool = False
    """Whether an engine had begun with the request."""
    warning: str = ""
    """The warning that a client who waits reads in the header."""


async def ask_endpoint(
    lookup: ModelLookup, endpoint: EndpointFunction, path: str, body: bytes, tenant: Tenant
) -> InternalAnswer:
    """The answer of `endpoint`, which stands at `path`, to a JSON body of `tenant`'s, as the lowest class of requests.

    Cancelling the task that waits for it cancels the request.
    """
    client = LocalClient(body)
    request_id = uuid4().hex
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    with lookup.open_request(endpoint_name(path), headers) as context:
        context.tenant, context.tenant_weight = tenant
        context.client_id, context.background = request_id, True
        scope = internal_scope(path, context, request_id)
        failure: CharoniaError | None = None
        try:
            response: Any = await endpoint(Request(scope, client.receive))
            await response(scope, client.receive, client.send)
        except CharoniaError as error:
            failure = error
        except CONTROL_FLOW:
            raise
        except BaseException:
            log.exception("a request of a batch to %s failed", path)
            failure = INTERNAL_SERVER_ERROR
        if failure is not None:
            context.fail(failure)
            await client.refuse(failure, path)
        begun = any(sequence.submitted is not None for sequence in context.sequences)
    warning = "; ".join(context.warnings)[:LONGEST_WARNING]
    return InternalAnswer(client.status, client.body, request_id, failure, begun, warning)
