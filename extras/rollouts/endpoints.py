"""/v2/routes/{name}/rollout: the rollout of a route, shown, begun and ended. A body is its plan in JSON."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...api.chunked_json import read_whole_json_object
from ...api.http.connection import read_json_body
from ...api.http.error_responses import json_response
from ...api.http.request_context import tenant_of
from .rollout_control import RolloutControl
from .rollout_entry import RolloutEntry

_MAX_BODY_BYTES = 1 << 16
_PATH = "/v2/routes/{name:path}/rollout"


class RolloutRoutes:
    """The routes and their handlers."""

    def __init__(self, rollouts: RolloutControl) -> None:
        self._rollouts = rollouts

    def routes(self) -> list[Route]:
        return [
            Route(_PATH, self.show, methods=["GET"]),
            Route(_PATH, self.start, methods=["POST"]),
            Route(_PATH, self.abort, methods=["DELETE"]),
        ]

    async def show(self, request: Request) -> Response:
        return json_response(_shown(self._rollouts.rollout(request.path_params["name"])))

    async def start(self, request: Request) -> Response:
        plan = await read_whole_json_object(await read_json_body(request, _MAX_BODY_BYTES))
        return json_response(_shown(await self._rollouts.start(request.path_params["name"], plan, _client(request))))

    async def abort(self, request: Request) -> Response:
        return json_response(_shown(await self._rollouts.abort(request.path_params["name"], _client(request))))


def _shown(entry: RolloutEntry) -> dict[str, Any]:
    shown = entry._asdict()
    return {**shown, "state": entry.state.value, "events": [event._asdict() for event in entry.events]}


def _client(request: Request) -> str:
    name = tenant_of(request.scope).name
    return f"{f'tenant {name!r}' if name else 'a client without a key'}, {request.method} /v2/routes"
