"""Lets in over HTTP who shows a key, and notes his tenant in the scope. Health is for everybody."""

import re

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from ...core.errors import CharoniaError, InvalidArgument
from ...core.request_context import current_request
from ..api_keys import ANONYMOUS, Keyring, Tenant
from .error_responses import error_response
from .request_context import record_error

_OPEN = re.compile(r"/health|/ping|/v2/health/(live|ready)|/v2/models/[^/]+(/versions/[^/]+)?/ready")
_TENANT = "charonia.tenant"


class AuthMiddleware:
    """Answers 401 in place of `app`, before anything of a body is read."""

    def __init__(self, app: ASGIApp, keys: Keyring) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and not _OPEN.fullmatch(scope["path"]):
            try:
                scope[_TENANT] = tenant = self._keys.authenticate(_shown(scope))
                record_tenant(tenant)
            except CharoniaError as error:
                record_error(error)
                app = error_response(error, scope["path"])
        await app(scope, receive, send)


def _shown(scope: Scope) -> str | None:
    """Raises `InvalidArgument` where it is not one: a proxy in front may have looked at the other."""
    shown = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(shown) > 1:
        raise InvalidArgument(f"{len(shown)} Authorization headers: send one")
    return shown[0].decode("latin-1") if shown else None


def record_tenant(tenant: Tenant) -> None:
    """The current request, if it is one that leaves a record, is this tenant's."""
    exchange = current_request()
    if exchange is not None:
        exchange.tenant = tenant.name


def tenant_of(connection: HTTPConnection) -> Tenant:
    """Who asks."""
    tenant: Tenant = connection.scope.get(_TENANT, ANONYMOUS)
    return tenant
