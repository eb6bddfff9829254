"""The context and the id of each request over HTTP, kept in the ASGI scope.

The id is the client's `X-Request-Id`, or a made-up one on the paths of OpenAI, whose package shows it. The response and
the request's record carry it.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any
from uuid import uuid4

from starlette.types import ASGIApp, Receive, Scope, Send

from ...core.errors import CharoniaError
from ...core.gateway import ModelLookup
from ...core.native_calls import CONTROL_FLOW
from ...core.request_context import Headers, RequestContext
from ..api_keys import ANONYMOUS, Tenant
from ..gateway_headers import GatewayHeaders
from .error_responses import error_response, unexpected_error
from .request_cycle import add_response_header, flush_parts
from .request_head import header_map, is_anthropic_path, is_openai_path

log = logging.getLogger(__name__)

_ENDPOINTS = {
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/responses/input_tokens": "tokenize",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "tokenize",
    "/v1/audio/transcriptions": "transcriptions",
    "/v1/audio/translations": "translations",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/rerank": "rerank",
    "/score": "score",
    "/v1/score": "score",
    "/classify": "classify",
    "/pooling": "pooling",
    "/invocations": "invocations",
    "/tokenize": "tokenize",
    "/detokenize": "detokenize",
}
_CONTEXT, _LATE_CONTEXT = "charonia.context", "charonia.late_context"
_ID_HEADER = b"x-request-id"
_ANTHROPIC_ID_HEADER = b"request-id"
_REQUEST_ID = "charonia.request_id"
_TENANT = "charonia.tenant"
_WARNINGS = "charonia.warnings"
ARM_HEADER = "x-charonia-arm"
WARNING_HEADER = "x-charonia-warning"
LONGEST_WARNING = 2000
"""Bytes of all warnings together: clients and proxies refuse long headers."""
_LONGEST_ID = 256
"""Bytes that are kept of a client's id."""
_MODEL_ENDPOINTS = ("infer", "generate", "generate_stream")


class LateContext:
    """Opens the context of a request when it is first of use, at last at the request's end, unless the request was
    `answered` and counted without."""

    __slots__ = ("_arrived_at", "_endpoint", "_lookup", "_scope", "answered")

    def __init__(self, lookup: ModelLookup, endpoint: str, scope: Scope) -> None:
        self._lookup = lookup
        self._endpoint = endpoint
        self._scope = scope
        self._arrived_at = time.monotonic()
        self.answered = False

    def open(self) -> RequestContext:
        scope = self._scope
        context = scope[_CONTEXT] = self._lookup.open_request(self._endpoint, scope["headers"])
        context.arrived_at = self._arrived_at
        context.client_id = request_id_of(scope)
        context.client = scope["client"][0] if scope.get("client") else ""
        context.tenant, context.tenant_weight = tenant_of(scope)
        return context

    def __enter__(self) -> None:
        self._scope[_LATE_CONTEXT] = self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        context: RequestContext | None = self._scope.get(_CONTEXT)
        del self._scope[_LATE_CONTEXT]  # which names the scope
        if context is None and self.answered and error is None:
            return
        (context or self.open()).__exit__(kind, error, trace)


class RequestContextMiddleware:
    """Gives a request its id, and opens the context of a request to a model; health and lookups have none.

    It stands around everything that may refuse. An unexpected exception becomes status 500, its traceback a log record.
    A slash at the end of a path is dropped, except on paths of v2, as in Triton.
    """

    def __init__(self, app: ASGIApp, lookup: ModelLookup) -> None:
        self._app = app
        self._lookup = lookup

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        send = _with_request_id(scope, send)
        path = scope["path"]
        if path.endswith("/") and path != "/" and not path.startswith("/v2"):
            scope["path"] = path = path[:-1]
        endpoint = endpoint_name(path)
        if path.startswith("/v2/models/") and path.rpartition("/")[2] in _MODEL_ENDPOINTS:
            endpoint = path.rpartition("/")[2]
        try:
            if not endpoint or scope["method"] != "POST":
                return await self._app(scope, receive, send)
            with LateContext(self._lookup, endpoint, scope):
                await self._app(scope, receive, send)
        except CONTROL_FLOW:
            flush_parts(scope)
            raise
        except BaseException as error:
            # Streams answer for themselves once they have begun (`EventStreamResponse`). What others have sent leaves
            # before the server closes the connection, as it does for a response that has no end.
            flush_parts(scope)
            log.exception("%s %s failed", scope["method"], path)
            await error_response(unexpected_error(error), path)(scope, receive, send)


def internal_scope(path: str, context: RequestContext, request_id: str) -> Scope:
    """The scope of a POST request that the server makes of its own endpoint at `path`, with this context."""
    tenant = Tenant(context.tenant, context.tenant_weight)
    scope = control_scope("POST", path, b"", list(context.headers), tenant)
    scope[_CONTEXT], scope[_REQUEST_ID] = context, request_id.encode()
    return scope


def control_scope(method: str, path: str, query: bytes, headers: Headers, tenant: Tenant) -> Scope:
    """The scope of a request that no connection of this process brought, without a context."""
    return {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query,
        "root_path": "",
        "headers": headers,
        "path_params": {},
        "client": None,
        "server": None,
        _TENANT: tenant,
    }


def endpoint_name(path: str) -> str:
    """The name of a model's endpoint in metrics and logs; empty for other paths."""
    return _ENDPOINTS.get(path, "")


def context_of(scope: Scope) -> RequestContext:
    """The context of a request that has one, and from now on does."""
    context: RequestContext | None = scope.get(_CONTEXT)
    return scope[_LATE_CONTEXT].open() if context is None else context


def late_context(scope: Scope) -> LateContext | None:
    """What opens the context of a request, if that may still be answered without."""
    return None if _CONTEXT in scope else scope.get(_LATE_CONTEXT)


def _has_context(scope: Scope) -> bool:
    return _CONTEXT in scope or _LATE_CONTEXT in scope


def answer_headers(scope: Scope) -> list[tuple[bytes, bytes]]:
    """The headers that tell which arm of a route answers, and what is not as the client asked; complete when the answer
    begins."""
    context: RequestContext | None = scope.get(_CONTEXT)
    if context is None:
        return _warning_header(scope.get(_WARNINGS, ()))
    arm = [(ARM_HEADER.encode(), context.arm.encode("ascii", "backslashreplace"))] if context.route else []
    return [*arm, *_warning_header(context.warnings)] if arm or context.warnings else []


def _warning_header(warnings: Sequence[str]) -> list[tuple[bytes, bytes]]:
    if not warnings:
        return []
    text = "; ".join(warnings).encode("ascii", "backslashreplace")
    printable = bytes(byte if 32 <= byte < 127 else 32 for byte in text)  # a field's name may hold line ends
    shortened = printable if len(printable) <= LONGEST_WARNING else printable[: LONGEST_WARNING - 3] + b"..."
    return [(WARNING_HEADER.encode(), shortened)]


def record_error(scope: Scope, error: CharoniaError) -> None:
    """Note in the request's context, if it has one, that the answer is this error."""
    if _has_context(scope):
        context_of(scope).fail(error)


def record_warning(scope: Scope, message: str) -> None:
    """Let the answer's header tell the client that something is not as it asked."""
    if _has_context(scope):
        context_of(scope).warn(message)
    else:
        scope.setdefault(_WARNINGS, []).append(message)


def record_body(scope: Scope, members: Mapping[str, Any]) -> None:
    """Note what a request's body says, in its context, if it has one."""
    if _has_context(scope):
        context_of(scope).body = members


def record_tenant(scope: Scope, tenant: Tenant) -> None:
    """Note the client's tenant, in the request's context too, if it has one."""
    scope[_TENANT] = tenant
    if _CONTEXT in scope:
        context = context_of(scope)
        context.tenant, context.tenant_weight = tenant


def record_hints(scope: Scope, gateway: GatewayHeaders, has_key: bool) -> None:
    """Note what a gateway's headers say in the request's context, if it has one; raises as `GatewayHeaders.note_in`."""
    if _has_context(scope):
        context = context_of(scope)
        headers = ((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        gateway.note_in(context, headers, has_key)
        scope[_TENANT] = Tenant(context.tenant, context.tenant_weight)


def tenant_of(scope: Scope) -> Tenant:
    """The tenant of the client's key."""
    tenant: Tenant = scope.get(_TENANT, ANONYMOUS)
    return tenant


def _with_request_id(scope: Scope, send: Send) -> Send:
    """Note the request's id in the scope, if it has one; the `send` that adds it to the response."""
    request_id = header_map(scope).get(_ID_HEADER, b"")[:_LONGEST_ID]
    if not request_id:
        if not is_openai_path(scope["path"]):
            return send
        request_id = uuid4().hex.encode()
    scope[_REQUEST_ID] = request_id
    if is_anthropic_path(scope["path"]):
        send = add_response_header(scope, send, _ANTHROPIC_ID_HEADER, request_id)
    return add_response_header(scope, send, _ID_HEADER, request_id)


def request_id_of(scope: Scope) -> str:
    """The request's id; empty if it has none."""
    request_id: bytes = scope.get(_REQUEST_ID, b"")
    return request_id.decode(errors="replace")
