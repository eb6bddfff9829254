"""The HTTP application as it is put together: FastAPI with the routes of all protocols and extensions, a fast path for
POST in front of it (`http/post_router.py`), and around both keys, rules and contexts."""

import re
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp

from ..core.errors import CharoniaError, NotFound, NotReady, ServerExiting
from ..core.extension_contracts import EndpointFunction
from ..core.gateway import Administration, ModelLookup
from ..telemetry.shared_state import ServerAdministration, ServerLookup
from .anthropic.routes import MessagesRoutes
from .api_keys import Keyring
from .extensions import RouteExtensions
from .http.access import AccessMiddleware
from .http.error_responses import anthropic_error_body, error_response, json_response
from .http.post_router import READING, PostRouter, SettledApp
from .http.request_context import ARM_HEADER, WARNING_HEADER, RequestContextMiddleware, record_error
from .http.request_head import is_anthropic_path, is_openai_path
from .http.rules import HttpRules
from .metadata import ServerInfo
from .openai.adapter_routes import AdapterRoutes
from .openai.audio_routes import AudioRoutes
from .openai.embeddings import EncoderRoutes
from .openai.invocations import InvocationRoutes
from .openai.model_list import ModelListRoutes
from .openai.responses_routes import ResponsesRoutes
from .openai.retention_routes import RetentionRoutes
from .openai.routes import OpenAIRoutes
from .openai.scoring import ScoringRoutes
from .openapi import DocsRoutes
from .prometheus import NO_METRICS, MetricRegistries, metrics_response
from .triton.control import ControlEndpoints
from .triton.endpoints import V2Endpoints
from .triton.explain import ExplainEndpoint
from .triton.traffic import TrafficEndpoints

_EXPOSED_HEADERS = (
    "endpoint-load-metrics",
    "inference-header-content-length",
    "request-id",
    "retry-after",
    "x-request-id",
    ARM_HEADER,
    WARNING_HEADER,
)
"""Headers of responses that a web page of another origin could not read otherwise."""

NOTHING_LISTED: Mapping[str, str] = MappingProxyType({})

_ENDPOINTS = {
    "health": "/health, /v2/health/live, /v2/health/ready",
    "models": "/v1/models, POST /v2/repository/index",
    "openai": "/v1/completions, /v1/chat/completions, /v1/responses, /v1/embeddings, /v1/rerank",
    "speech": "/v1/audio/transcriptions, /v1/audio/translations",
    "vllm": "/score, /classify, /pooling, /invocations, /load, /tokenizer_info",
    "sglang": "/server_info, /model_info",
    "anthropic": "/v1/messages, /v1/messages/count_tokens",
    "triton": "/v2, /v2/models/{model}/infer, /v2/models/{model}/generate, /v2/models/{model}/generate_stream",
    "routes": "/v2/routes",
    "adapters": "/v1/load_lora_adapter, /v1/unload_lora_adapter",
    "sessions": "/v1/release_retention",
    "tokens": "/tokenize, /detokenize",
    "metrics": "/metrics",
}


def build_app(
    administration: ServerAdministration,
    info: ServerInfo,
    keys: Keyring | None = None,
    rules: HttpRules | None = None,
    metrics: MetricRegistries = NO_METRICS,
    extensions: RouteExtensions | None = None,
) -> ASGIApp:
    """The application of port 8000, in the process that has the models. `keys`: required by every route but health;
    `metrics`: shown by /metrics."""
    rules = rules or HttpRules()
    app = routed_app(all_routes(administration, info, rules, metrics, extensions))
    return protected_app(app, administration, keys, rules)


def build_worker_app(
    lookup: ServerLookup,
    info: ServerInfo,
    keys: Keyring | None,
    rules: HttpRules,
    forwarded: Sequence[Route],
    extensions: Sequence[BaseRoute] = (),
    listed: Mapping[str, str] = NOTHING_LISTED,
) -> ASGIApp:
    """The application of port 8000, in a process that has no models. `forwarded`: `control_routes`, as this process
    answers them; `extensions` likewise, and what they add to the list of endpoints."""
    own = lookup_routes(lookup, info, rules, listed)
    return protected_app(routed_app(_match_to_the_end([*extensions, *own, *forwarded])), lookup, keys, rules)


def protected_app(app: ASGIApp, lookup: ModelLookup, keys: Keyring | None, rules: HttpRules) -> ASGIApp:
    """The endpoints of a `routed_app`, behind keys and rules, each request to a model with its context."""
    app = AccessMiddleware(app, keys or Keyring(), rules)
    app = RequestContextMiddleware(app, lookup)
    if not rules.allowed_origins:
        return app
    # Browsers show a response to a page of another origin only where headers allow it, and ask before they send JSON
    # or a key (https://fetch.spec.whatwg.org/#http-cors-protocol). Other clients do as they like.
    return CORSMiddleware(
        app,
        allow_origins=rules.allowed_origins,
        allow_methods=("GET", "POST", "PUT", "DELETE"),
        allow_headers=("*",),
        expose_headers=_EXPOSED_HEADERS,
    )


def routed_app(routes: Sequence[BaseRoute]) -> ASGIApp:
    """The endpoints alone: what stands around them in `protected_app` has done its part before."""
    fastapi = FastAPI(openapi_url=None, redirect_slashes=False)
    fastapi.router.routes.extend(routes)
    fastapi.add_exception_handler(CharoniaError, _charonia_error)
    fastapi.add_exception_handler(HTTPException, _no_route)
    return PostRouter(routes, fastapi)


def all_routes(
    administration: ServerAdministration,
    info: ServerInfo,
    rules: HttpRules,
    metrics: MetricRegistries = NO_METRICS,
    extensions: RouteExtensions | None = None,
    settle: Callable[[], Awaitable[None]] | None = None,
) -> list[BaseRoute]:
    """The routes of `extensions`, and after them those of every protocol. `settle`: awaited before the answer to what
    may change the server's state, where other processes go by it too."""
    extensions = extensions or RouteExtensions()
    own = lookup_routes(administration, info, rules, extensions.listed)
    control = control_routes(administration, info, rules, metrics)
    added = extensions.serve(administration, _endpoints([*own, *control]))
    if settle is not None:
        added = [_settled(route, settle) for route in added]
        control = [_settled(route, settle) for route in control]
    return _match_to_the_end([*added, *own, *control])


def _settled(route: Any, settle: Callable[[], Awaitable[None]]) -> Any:
    """The route, answered after `settle` unless its requests only read."""
    if isinstance(route, Route) and {*(route.methods or ())} - READING and not route.path.endswith("/index"):
        route.app = SettledApp(route.app, settle)
    return route


def lookup_routes(
    lookup: ServerLookup, info: ServerInfo, rules: HttpRules, listed: Mapping[str, str] = NOTHING_LISTED
) -> list[Route]:
    """The server's routes that every process answers by itself: endpoints of models, health, and what never changes.
    `listed`: what extensions add to the list of endpoints."""
    routes = [
        *V2Endpoints(lookup, info, rules.forwarding).routes(),
        *OpenAIRoutes(lookup, info).routes(),
        *ResponsesRoutes(lookup, info).routes(),
        *MessagesRoutes(lookup, info).routes(),
        *AudioRoutes(lookup, info).routes(),
        *EncoderRoutes(lookup, info.max_input_size).routes(),
        *ScoringRoutes(lookup, info.max_input_size, info.max_response_size).routes(),
        *_server_routes(lookup, info, listed),
    ]
    return [*routes, *InvocationRoutes(lookup, info.max_input_size, _endpoints(routes)).routes()]


def control_routes(
    administration: ServerAdministration, info: ServerInfo, rules: HttpRules, metrics: MetricRegistries = NO_METRICS
) -> list[Route]:
    """The server's routes that the process answers that has the models: others forward their requests as they are."""
    return [
        *ControlEndpoints(administration, info.max_input_size).routes(),
        *TrafficEndpoints(administration).routes(),
        *ModelListRoutes(administration).routes(),
        *AdapterRoutes(administration, rules.lora_root, info.max_input_size).routes(),
        *RetentionRoutes(administration, rules.gateway, info.max_input_size).routes(),
        *ExplainEndpoint(administration, metrics.whole).routes(),
        *_measured_routes(administration, metrics.shown),
        *(DocsRoutes(info).routes() if rules.api_docs else ()),
    ]


def _endpoints(routes: Iterable[Route]) -> dict[str, EndpointFunction]:
    return {route.path: route.endpoint for route in routes}


def _match_to_the_end(routes: list[BaseRoute]) -> list[BaseRoute]:
    """The same routes: they match to the very end of a path, a line break there included."""
    for route in routes:
        if isinstance(route, Route):
            route.path_regex = re.compile(route.path_regex.pattern.removesuffix("$") + r"\Z")
    return routes


def _server_routes(lookup: ModelLookup, info: ServerInfo, listed: Mapping[str, str]) -> list[Route]:
    """The server's health, version and list of endpoints, where clients of vLLM look for them."""

    async def index(request: Request) -> Response:
        server = {"name": info.name, "server": "charonia", "version": info.version}
        docs = "docs/clients.md of charonia's repository, or `charonia serve --help` for the flags"
        return json_response({**server, "endpoints": {**_ENDPOINTS, **listed}, "docs": docs})

    async def health(request: Request) -> Response:
        """200, or 503 while a known model is not ready: load balancers understand that; v2's readiness is 400."""
        if not lookup.ready():
            raise ServerExiting if lookup.exiting() else NotReady("the server is not ready")
        return Response()

    async def version(request: Request) -> Response:
        return json_response({"version": info.version})

    return [
        Route("/", index, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/ping", health, methods=["GET", "POST"]),
        Route("/version", version, methods=["GET"]),
    ]


def _measured_routes(administration: Administration, registry: CollectorRegistry | None) -> list[Route]:
    """The server's load and metrics."""

    async def load(request: Request) -> Response:
        """The number of requests that are being answered, as vLLM tells it."""
        return json_response({"server_load": administration.requests_in_flight()})

    routes = [Route("/load", load, methods=["GET"])]
    if registry is not None:

        async def metrics(request: Request) -> Response:
            return metrics_response(registry)

        routes.append(Route("/metrics", metrics, methods=["GET"]))
    return routes


async def _charonia_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, CharoniaError)
    record_error(request.scope, error)
    return error_response(error, request.url.path)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    record_error(request.scope, NotFound(error.detail))
    headers = dict(error.headers or {})  # of a wrong method: those that would be right
    if is_anthropic_path(request.url.path):
        missing = NotFound(f"{error.detail}: {request.method} {request.url.path}")
        return json_response(anthropic_error_body(missing, error.status_code), error.status_code, headers)
    if request.url.path.startswith("/v2") and not is_openai_path(request.url.path):
        return json_response({"error": error.detail}, error.status_code, headers)
    body = {"message": f"{error.detail}: {request.method} {request.url.path}", "type": "invalid_request_error"}
    return json_response({"error": {**body, "param": None, "code": None}}, error.status_code, headers)
