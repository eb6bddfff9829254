"""Lets in over HTTP who shows a key, and notes his tenant in the scope. Health is for everybody."""

import re

from starlette.requests import HTTPConnection
from starlette.types import ASGIApp, Receive, Scope, Send

from ..core.errors import Unauthenticated
from ..core.exchange import current
from .exchanges import note
from .faults import error_response
from .keys import NOBODY, Keyring, Tenant

_OPEN = re.compile(r"/health|/ping|/v2/health/(live|ready)|/v2/models/[^/]+(/versions/[^/]+)?/ready")
_TENANT = "charonia.tenant"


class Guard:
    """Answers 401 in place of `app`, before anything of a body is read."""

    def __init__(self, app: ASGIApp, keys: Keyring) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and not _OPEN.fullmatch(scope["path"]):
            try:
                scope[_TENANT] = tenant = self._keys.tenant(HTTPConnection(scope).headers.get("authorization"))
                name_tenant(tenant)
            except Unauthenticated as error:
                note(error)
                app = error_response(error, scope["path"])
        await app(scope, receive, send)


def name_tenant(tenant: Tenant) -> None:
    """The current request, if it is one that leaves a record, is his."""
    exchange = current()
    if exchange is not None:
        exchange.tenant = tenant.name


def tenant_of(connection: HTTPConnection) -> Tenant:
    """Who asks."""
    tenant: Tenant = connection.scope.get(_TENANT, NOBODY)
    return tenant
