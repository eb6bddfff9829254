"""The routes that register and unregister shared memory of clients.

https://github.com/triton-inference-server/server/blob/main/docs/protocol/extension_shared_memory.md. The regions are
kept behind the gateway.
"""

import base64
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ...core.errors import InvalidArgument
from ...processes.client_shared_memory import SharedMemoryRegistry
from ...telemetry.shared_state import ServerGateway
from ..http.connection import read_json_body
from ..http.error_responses import json_response
from ..json_values import JsonObject, as_object, as_string, as_unsigned, parse_json_object

_SYSTEM = "/v2/systemsharedmemory"
_CUDA = "/v2/cudasharedmemory"


class SharedMemoryEndpoints:
    """The handlers. Bodies have at most `max_size` bytes."""

    def __init__(self, gateway: ServerGateway, max_size: int) -> None:
        self._gateway = gateway
        self._max_size = max_size

    @property
    def _regions(self) -> SharedMemoryRegistry:
        return self._gateway.shared_state.shared_memory

    def routes(self) -> list[Route]:
        routes = []
        for root, status, register, unregister in (
            (_SYSTEM, self.status, self.register, self.unregister),
            (_CUDA, self.cuda_status, self.cuda_register, self.cuda_unregister),
        ):
            region = root + "/region/{region}"
            routes += [
                *[Route(f"{path}/status", status, methods=["GET"]) for path in (root, region)],
                Route(f"{region}/register", register, methods=["POST"]),
                *[Route(f"{path}/unregister", unregister, methods=["POST"]) for path in (root, region)],
            ]
        return routes

    async def status(self, request: Request) -> Response:
        return json_response([region._asdict() for region in self._regions.status(_named(request))])

    async def register(self, request: Request) -> Response:
        document = await self._document(request)
        key = as_string("key", _required(document, "key"))
        offset = as_unsigned("offset", document.get("offset", 0))
        self._regions.register(_named(request), key, offset, as_unsigned("byte_size", _required(document, "byte_size")))
        return Response()

    async def unregister(self, request: Request) -> Response:
        self._regions.unregister(_named(request))
        return Response()

    async def cuda_status(self, request: Request) -> Response:
        self._regions.status_cuda(_named(request))
        return json_response([])

    async def cuda_register(self, request: Request) -> Response:
        document = await self._document(request)
        handle = as_object("raw_handle", _required(document, "raw_handle"))
        try:
            base64.b64decode(as_string("b64", _required(handle, "b64")), validate=True)
        except ValueError:
            raise InvalidArgument("'b64' of 'raw_handle' is not base64", field="raw_handle") from None
        as_unsigned("byte_size", _required(document, "byte_size"))
        self._regions.register_cuda(_named(request))
        return Response()

    async def cuda_unregister(self, request: Request) -> Response:
        self._regions.unregister_cuda()
        return Response()

    async def _document(self, request: Request) -> JsonObject:
        body = await read_json_body(request, self._max_size)
        return parse_json_object(body) if body else {}


def _named(request: Request) -> str:
    name: str = request.path_params.get("region", "")
    return name


def _required(document: JsonObject, key: str) -> Any:
    if key not in document:
        raise InvalidArgument(f"Shared memory register request has no '{key}' field", field=key)
    return document[key]
