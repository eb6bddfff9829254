"""The HTTP application: both doors over one gateway, and what they say when something is wrong.

Hot routes are plain Starlette routes inside FastAPI's application: no dependency solving, no response models.
"""

import logging

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ..core.errors import CharoniaError, NotFound
from ..core.gateway import Gateway
from .connection import ClientLeft
from .exchanges import Exchanges, note
from .faults import UNEXPECTED, error_response, json_response
from .guard import Guard
from .keys import Keyring
from .metadata import ServerInfo
from .openai import OpenAI
from .tokenization import Tokenization
from .v2 import V2

log = logging.getLogger(__name__)

_CLIENT_LEFT = 499
"""What nginx logs for it; nobody receives it."""


def build_app(gateway: Gateway, info: ServerInfo, keys: Keyring | None = None) -> FastAPI:
    """Every HTTP route of port 8000; with `keys`, only health is for everybody."""
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    app.router.routes.extend(V2(gateway, info).routes())
    app.router.routes.extend(OpenAI(gateway, info.max_input_size).routes())
    app.router.routes.extend(Tokenization(gateway, info.max_input_size).routes())
    app.add_exception_handler(CharoniaError, _charonia_error)
    app.add_exception_handler(HTTPException, _no_route)
    app.add_exception_handler(ClientLeft, _client_left)
    if keys:
        app.add_middleware(Guard, keys=keys)
    app.add_middleware(Exchanges, gateway=gateway)
    app.add_middleware(LastResort)
    return app


class LastResort:
    """Answers what nobody expected, once, and keeps the connection: the traceback is for the log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except Exception:
            # Streams answer for themselves once they have begun (`EventStream`), so nothing was sent yet.
            log.exception("%s %s failed", scope.get("method"), scope.get("path"))
            await error_response(UNEXPECTED, scope["path"])(scope, receive, send)


async def _charonia_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, CharoniaError)
    note(error)
    return error_response(error, request.url.path)


async def _no_route(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    note(NotFound(error.detail))
    if not request.url.path.startswith("/v1/"):
        return json_response({"error": error.detail}, error.status_code)
    body = {"message": f"{error.detail}: {request.method} {request.url.path}", "type": "invalid_request_error"}
    return json_response({"error": {**body, "param": None, "code": None}}, error.status_code)


async def _client_left(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_LEFT)
