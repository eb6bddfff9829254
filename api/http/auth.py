"""Access to the HTTP endpoints: API keys, and the headers that restricted parts of v2 require."""

import re
from collections.abc import Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from ...core.errors import CharoniaError, InvalidArgument, Unauthenticated
from ..api_keys import Keyring
from ..restricted_apis import RequiredHeader, restricted_api_of
from .error_responses import error_response, json_response, v2_error_body
from .request_context import record_error, record_tenant

_OPEN = re.compile(r"/health|/ping|/v2/health/(live|ready)|/v2/models/[^/]+(/versions/[^/]+)?/ready")


class AuthMiddleware:
    """Answers 401 in place of `app` to requests without a key, before anything of a body is read.

    The key's tenant is noted in the request's context. Health needs no key.
    """

    def __init__(self, app: ASGIApp, keys: Keyring) -> None:
        self._app = app
        self._keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        if scope["type"] == "http" and not _OPEN.fullmatch(scope["path"]):
            try:
                record_tenant(scope, self._keys.authenticate(_authorization(scope)))
            except CharoniaError as error:
                record_error(scope, error)
                app = error_response(error, scope["path"])
        await app(scope, receive, send)


class RestrictedApiMiddleware:
    """Answers 403 in place of `app` to requests that lack the header which their API requires.

    `required`: that header, by the name of the API.
    """

    def __init__(self, app: ASGIApp, required: Mapping[str, RequiredHeader]) -> None:
        self._app = app
        self._required = required

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app, header = self._app, None
        if scope["type"] == "http":
            header = self._required.get(restricted_api_of(scope["path"]) or "")
        if header is not None and not header.matches(_first(scope, header.key.lower().encode())):
            error = Unauthenticated(f"This API is restricted, expecting header '{header.key}'")
            record_error(scope, error)
            app = json_response(v2_error_body(error), 403)
        await app(scope, receive, send)


def _first(scope: Scope, name: bytes) -> str | None:
    return next((value.decode("latin-1") for each, value in scope["headers"] if each == name), None)


def _authorization(scope: Scope) -> str | None:
    """The header's text. Raises `InvalidArgument` for several: a proxy in front may have checked another one."""
    shown = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(shown) > 1:
        raise InvalidArgument(f"{len(shown)} Authorization headers: send one")
    return shown[0].decode("latin-1") if shown else None
