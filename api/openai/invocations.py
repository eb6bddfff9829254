"""/invocations of vLLM's API, the one path that SageMaker asks a container on: the body shows what is asked for."""

from collections.abc import Awaitable, Callable, Mapping
from typing import TypeAlias

from starlette.requests import Request
from starlette.routing import Route
from starlette.types import ASGIApp

from ...core.encoder_tensors import EMBEDDING
from ...core.errors import InvalidArgument
from ...core.gateway import ModelLookup
from ..http.request_context import context_of, endpoint_name
from .encoder_calls import makes
from .json_body import JsonBody, read_ahead

Endpoint: TypeAlias = Callable[[Request], Awaitable[ASGIApp]]

_BY_MEMBER = {
    "messages": "/v1/chat/completions",
    "prompt": "/v1/completions",
    "query": "/v1/rerank",
    "queries": "/score",
    "text_1": "/score",
    "data_1": "/score",
}
"""By a member that a body has: the path of its endpoint; `input` is for the one that its model serves."""


class InvocationRoutes:
    """The endpoint, and the others that it calls: `endpoints` by their paths."""

    def __init__(self, lookup: ModelLookup, max_input_size: int, endpoints: Mapping[str, Endpoint]) -> None:
        self._lookup = lookup
        self._max_input_size = max_input_size
        self._endpoints = endpoints

    def routes(self) -> list[Route]:
        return [Route("/invocations", self.invoke, methods=["POST"])]

    async def invoke(self, request: Request) -> ASGIApp:
        members = await read_ahead(request, self._max_input_size)
        path = self._path(members)
        context_of(request.scope).endpoint = endpoint_name(path)
        return await self._endpoints[path](request)

    def _path(self, members: JsonBody) -> str:
        for member, path in _BY_MEMBER.items():
            if member in members:
                return path
        if "input" in members:
            return "/v1/embeddings" if self._makes_embeddings(members.get("model")) else "/classify"
        message = f"none of {', '.join((*_BY_MEMBER, 'input'))} is there: what is asked for?"
        raise InvalidArgument(message)

    def _makes_embeddings(self, name: object) -> bool:
        """Whether the model called so makes vectors; what becomes of an unknown one is for its endpoint to say."""
        models = [model for model in self._lookup.model_configs() if not name or name in (model.name, *model.aliases)]
        return not models or any(makes(model, EMBEDDING) for model in models)
