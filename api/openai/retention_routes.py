"""/v1/release_retention: a session is over, and what the cache retains for it makes room.

Translates between the protocol and the gateway.
"""

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...core.errors import InvalidArgument
from ...core.gateway import Administration
from ...core.request_context import RequestContext
from ...core.retention import LONGEST_SCOPE
from ..api_keys import ANONYMOUS
from ..gateway_headers import GatewayHeaders
from ..http.error_responses import json_response
from ..http.request_context import tenant_of
from .json_body import BodyFormat


class ReleaseRetentionBody(msgspec.Struct, frozen=True):
    """`retention_scope` may be left out where a gateway's header that is believed names the session."""

    model: str = ""
    retention_scope: str = ""


_RELEASE = BodyFormat(ReleaseRetentionBody, {})


class RetentionRoutes:
    """The endpoint and its handler. `gateway`: the headers that are believed, of which the session names a scope."""

    def __init__(self, administration: Administration, gateway: GatewayHeaders, max_input_size: int) -> None:
        self._administration = administration
        self._gateway = gateway
        self._max_input_size = max_input_size

    def routes(self) -> list[Route]:
        return [Route("/v1/release_retention", self.release, methods=["POST"])]

    async def release(self, request: Request) -> Response:
        body = await _RELEASE.read(request, self._max_input_size)
        tenant = tenant_of(request.scope)
        context = RequestContext("release_retention", tenant=tenant.name)
        self._gateway.note_in(context, request.headers.items(), has_key=tenant != ANONYMOUS)
        scope = body.retention_scope or context.hints.session
        if not 0 < len(scope) <= LONGEST_SCOPE:
            message = f"retention_scope must have 1 to {LONGEST_SCOPE} characters"
            raise InvalidArgument(message, field="retention_scope")
        if not body.model:
            raise InvalidArgument("model must name the model that retains", field="model")
        self._administration.release_scope(body.model, context.tenant, scope)
        return json_response({"released": scope})
