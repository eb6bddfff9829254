"""/v2/routes: the names that stand for several models, listed and changed while they serve. An extension of ours.

Translates between HTTP and the gateway. A body is a route as `routes.yaml` has it, in JSON.
"""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...core.errors import InvalidArgument
from ...core.traffic import RouteEntry
from ...telemetry.shared_state import ServerAdministration
from ..chunked_json import read_whole_json_object
from ..http.connection import read_json_body
from ..http.error_responses import json_response
from ..http.request_context import tenant_of

_MAX_BODY_BYTES = 1 << 16


class TrafficEndpoints:
    def __init__(self, administration: ServerAdministration) -> None:
        self._administration = administration

    def routes(self) -> list[Route]:
        one = "/v2/routes/{name:path}"
        return [
            Route("/v2/routes", self.list, methods=["GET"]),
            Route(one, self.show, methods=["GET"]),
            Route(one, self.put, methods=["PUT"]),
            Route(one, self.delete, methods=["DELETE"]),
        ]

    async def list(self, request: Request) -> Response:
        return json_response({"routes": [_shown(entry) for entry in self._administration.route_control.entries()]})

    async def show(self, request: Request) -> Response:
        return json_response(_shown(self._administration.route_control.entry(request.path_params["name"])))

    async def put(self, request: Request) -> Response:
        """Query: `version`, that the route is expected to have, 0 for none."""
        expect = _expected_version(request)
        route = await read_whole_json_object(await read_json_body(request, _MAX_BODY_BYTES))
        name, who = request.path_params["name"], _client(request)
        return json_response(_shown(await self._administration.route_control.put_document(name, route, who, expect)))

    async def delete(self, request: Request) -> Response:
        """Query: as of `put`."""
        name, expect = request.path_params["name"], _expected_version(request)
        await self._administration.route_control.delete(name, _client(request), expect)
        return json_response({"name": name, "deleted": True})


def _shown(entry: RouteEntry) -> dict[str, Any]:
    return {"name": entry.name, "version": entry.version, "changed_by": entry.changed_by, "route": entry.route}


def _expected_version(request: Request) -> int | None:
    text = request.query_params.get("version")
    if text is not None and not (text.isascii() and text.isdigit() and len(text) < 19):
        raise InvalidArgument(f"version must be a number of 0 or more, got '{text[:32]}'", field="version")
    return None if text is None else int(text)


def _client(request: Request) -> str:
    name = tenant_of(request.scope).name
    return f"{f'tenant {name!r}' if name else 'a client without a key'}, {request.method} /v2/routes"
