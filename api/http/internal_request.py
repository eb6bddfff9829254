"""A request that the server makes of one of its own endpoints for a client who does not wait: the endpoint's function
is called as for a request that came over HTTP, with a context of its own, and no connection."""

import asyncio
import logging
from typing import Any, NamedTuple
from uuid import uuid4

from starlette.requests import Request
from starlette.types import Message

from ...core.errors import CharoniaError
from ...core.extension_contracts import EndpointFunction
from ...core.gateway import ModelLookup
from ...core.native_calls import CONTROL_FLOW
from ..api_keys import Tenant
from .error_responses import INTERNAL_SERVER_ERROR, error_response
from .request_context import LONGEST_WARNING, endpoint_name, internal_scope

log = logging.getLogger(__name__)


class InternalAnswer(NamedTuple):
    """What an endpoint answered. `error`: what it raised, if it did; `begun`: an engine had begun with the request;
    `warning`: what a client that waits reads in the header."""

    status: int
    body: bytes
    request_id: str
    error: CharoniaError | None = None
    begun: bool = False
    warning: str = ""


async def ask_endpoint(
    lookup: ModelLookup, endpoint: EndpointFunction, path: str, body: bytes, tenant: Tenant
) -> InternalAnswer:
    """The answer of `endpoint`, which stands at `path`, to a JSON body of `tenant`'s, as the lowest class of requests.

    Cancelling the task that waits for it cancels the request.
    """
    request_id, content = uuid4().hex, body
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    messages: list[Message] = []

    async def receive() -> Message:
        nonlocal content
        if content:
            message, content = {"type": "http.request", "body": content, "more_body": False}, b""
            return message
        never: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        return await never  # this client does not leave; its task may be cancelled

    async def send(message: Message) -> None:
        messages.append(message)

    with lookup.open_request(endpoint_name(path), headers) as context:
        context.tenant, context.tenant_weight = tenant
        context.client_id, context.background = request_id, True
        scope = internal_scope(path, context, request_id)
        failure: CharoniaError | None = None
        try:
            response = await endpoint(Request(scope, receive))
            await response(scope, receive, send)
        except CharoniaError as error:
            failure = error
        except CONTROL_FLOW:
            raise
        except BaseException:
            log.exception("a request of a batch to %s failed", path)
            failure = INTERNAL_SERVER_ERROR
        if failure is not None:
            context.fail(failure)
            messages.clear()
            await error_response(failure, path)(scope, receive, send)
        begun = any(each.submitted is not None for each in context.sequences)
    status: Any = messages[0]["status"]
    told = "; ".join(context.warnings)[:LONGEST_WARNING]
    body_sent = b"".join(each.get("body", b"") for each in messages[1:])
    return InternalAnswer(status, body_sent, request_id, failure, begun, told)
