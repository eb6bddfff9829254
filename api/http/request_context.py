"""The context and the id of each request over HTTP, kept in the ASGI scope.

The id is the client's `X-Request-Id`, or a made-up one on the paths of OpenAI, whose package shows it. The response
carries it, and so does the request's record. Knows which paths are endpoints of models; not what these do.
"""

from uuid import uuid4

from starlette.types import ASGIApp, Receive, Scope, Send

from ...core.errors import CharoniaError
from ...core.gateway import Gateway
from ...core.request_context import RequestContext
from ..api_keys import Tenant
from .error_responses import is_openai_path
from .request_cycle import add_response_header

_ENDPOINTS = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
_CONTEXT = "charonia.context"
_ID_HEADER = b"x-request-id"
_REQUEST_ID = "charonia.request_id"
_LONGEST_ID = 256
"""Bytes that are kept of a client's id."""
_MODELS = "/v2/models/"
_MODEL_ENDPOINTS = ("infer", "generate", "generate_stream")


class RequestContextMiddleware:
    """Opens the context of a request to a model, around everything that may refuse it. Health and lookups have none."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = _endpoint_of(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else ""
        if not endpoint:
            return await self._app(scope, receive, send)
        with self._gateway.open_request(endpoint, scope["headers"]) as context:
            context.client_id = request_id_of(scope)
            scope[_CONTEXT] = context
            return await self._app(scope, receive, send)


def context_of(scope: Scope) -> RequestContext:
    """The context of a request to a model."""
    context: RequestContext = scope[_CONTEXT]
    return context


def record_error(scope: Scope, error: CharoniaError) -> None:
    """Note in the request's context, if it has one, that the answer is this error."""
    if _CONTEXT in scope:
        context_of(scope).fail(error)


def record_tenant(scope: Scope, tenant: Tenant) -> None:
    """Note in the request's context, if it has one, the client's tenant."""
    if _CONTEXT in scope:
        context = context_of(scope)
        context.tenant, context.tenant_weight = tenant


def _endpoint_of(path: str) -> str:
    if not path.startswith(_MODELS):
        return _ENDPOINTS.get(path, "")
    last = path.rpartition("/")[2]
    return last if last in _MODEL_ENDPOINTS else ""


def with_request_id(scope: Scope, send: Send) -> Send:
    """Note the request's id in the scope, if it has one; the `send` that adds it to the response."""
    given: bytes = dict(scope["headers"]).get(_ID_HEADER, b"")[:_LONGEST_ID]
    if not given:
        if not is_openai_path(scope["path"]):
            return send
        given = uuid4().hex.encode()
    scope[_REQUEST_ID] = given
    return add_response_header(scope, send, _ID_HEADER, given)


def request_id_of(scope: Scope) -> str:
    """The request's id; empty if it has none."""
    given: bytes = scope.get(_REQUEST_ID, b"")
    return given.decode(errors="replace")
