"""The routes for the server's health, version, metrics and list of endpoints, where clients of vLLM look for them."""

from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...core.errors import NotReady, ServerExiting
from ...core.gateway import Gateway
from ..metadata import ServerInfo
from ..prometheus import metrics_response
from .error_responses import json_response

_ENDPOINTS = {
    "health": "/health, /v2/health/live, /v2/health/ready",
    "models": "/v1/models, POST /v2/repository/index",
    "openai": "/v1/completions, /v1/chat/completions, /v1/embeddings, /v1/rerank",
    "triton": "/v2, /v2/models/{model}/infer, /v2/models/{model}/generate, /v2/models/{model}/generate_stream",
    "tokens": "/tokenize, /detokenize",
    "metrics": "/metrics",
}


class ServerEndpoints:
    """The handlers. Without a `registry` there is no /metrics."""

    def __init__(self, gateway: Gateway, info: ServerInfo, registry: CollectorRegistry | None) -> None:
        self._gateway = gateway
        self._info = info
        self._registry = registry

    def routes(self) -> list[Route]:
        routes = [
            Route("/", self.index, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/version", self.version, methods=["GET"]),
        ]
        return routes if self._registry is None else [*routes, Route("/metrics", self.metrics, methods=["GET"])]

    async def index(self, request: Request) -> Response:
        said = {"name": self._info.name, "server": "charonia", "version": self._info.version}
        docs = "docs/clients.md of charonia's repository, or `charonia serve --help` for the flags"
        return json_response({**said, "endpoints": _ENDPOINTS, "docs": docs})

    async def health(self, request: Request) -> Response:
        """200, or 503 while a known model is not ready: load balancers understand that; v2's readiness is 400."""
        if not self._gateway.ready():
            raise ServerExiting if self._gateway.exiting() else NotReady("the server is not ready")
        return Response()

    async def version(self, request: Request) -> Response:
        return json_response({"version": self._info.version})

    async def metrics(self, request: Request) -> Response:
        assert self._registry is not None
        return metrics_response(self._registry)
