"""The request context of each request over HTTP, from the ASGI scope: opened here, found here.

Knows which paths are endpoints of models; not what these do.
"""

from starlette.types import ASGIApp, Receive, Scope, Send

from ...core.errors import CharoniaError
from ...core.gateway import Gateway
from ...core.request_context import RequestContext
from ..api_keys import Tenant
from .request_ids import request_id_of

_DOORS = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
_CONTEXT = "charonia.context"
_MODELS = "/v2/models/"
_MODEL_DOORS = ("infer", "generate", "generate_stream")


class RequestContextMiddleware:
    """Opens the context of a request to a model, around everything that may refuse it. Health and lookups have none."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        door = _door(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else ""
        if not door:
            return await self._app(scope, receive, send)
        with self._gateway.open_request(door, scope["headers"]) as context:
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


def _door(path: str) -> str:
    if not path.startswith(_MODELS):
        return _DOORS.get(path, "")
    last = path.rpartition("/")[2]
    return last if last in _MODEL_DOORS else ""
