"""Opens the exchange of each request that comes over HTTP. Knows which paths are doors; not what they do."""

from starlette.types import ASGIApp, Receive, Scope, Send

from ...core.errors import CharoniaError
from ...core.gateway import Gateway
from ...core.request_context import current_request
from .request_ids import request_id_of

_DOORS = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
_MODELS = "/v2/models/"
_MODEL_DOORS = ("infer", "generate", "generate_stream")


class RequestContextMiddleware:
    """Around everything that may refuse a request: whoever does, one record ends it. Health and lookups leave none."""

    def __init__(self, app: ASGIApp, gateway: Gateway) -> None:
        self._app = app
        self._gateway = gateway

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        door = _door(scope["path"]) if scope["type"] == "http" and scope["method"] == "POST" else ""
        if not door:
            return await self._app(scope, receive, send)
        with self._gateway.open_request(door, scope["headers"]) as exchange:
            exchange.client_id = request_id_of(scope)
            return await self._app(scope, receive, send)


def record_error(error: CharoniaError) -> None:
    """The current request, if it is one that leaves a record, is answered with this error."""
    exchange = current_request()
    if exchange is not None:
        exchange.fail(error)


def _door(path: str) -> str:
    if not path.startswith(_MODELS):
        return _DOORS.get(path, "")
    last = path.rpartition("/")[2]
    return last if last in _MODEL_DOORS else ""
