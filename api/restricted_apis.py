"""Parts of v2 that only those may use who show a value: `--http-restricted-api` and its like.

v2's section 1.2 in code: which parts there are, and what their flags mean. Knows no protocol but HTTP's paths.
"""

import hmac
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from starlette.types import ASGIApp, Receive, Scope, Send

from ..core.errors import InvalidArgument, Unauthenticated
from .http.error_responses import json_response, v2_error_body
from .http.request_context import record_error

_MODEL = r"/v2/models/[^/]+(/versions/[0-9]+)?"
_PATHS = {
    "health": rf"/health|/ping|/v2/health/(live|ready)|{_MODEL}/ready",
    "statistics": rf"/metrics|/v2/models/stats|{_MODEL}/stats",
    "metadata": rf"/|/version|/v2|{_MODEL}|/v1/models(/.*)?",
    "inference": rf"{_MODEL}/(infer|generate|generate_stream)|/v1/(?!models).*|/tokenize|/detokenize",
    "shared-memory": r"/v2/(system|cuda)sharedmemory/.*",
    "model-config": rf"{_MODEL}/config",
    "model-repository": r"/v2/repository/.*",
    "trace": r"/v2/trace/setting|/v2/models/[^/]+/trace/setting",
    "logging": r"/v2/logging",
}
_API = re.compile("|".join(f"(?P<{name.replace('-', '_')}>{path})" for name, path in _PATHS.items()), re.DOTALL)

APIS = tuple(_PATHS)
"""What can be restricted. Endpoints of OpenAI and vLLM go with v2's that do the same."""


class RequiredHeader(NamedTuple):
    """The header that must have this value."""

    key: str
    value: str

    def matches(self, shown: str | None) -> bool:
        return shown is not None and hmac.compare_digest(shown.encode(), self.value.encode())


def read_restrictions(groups: Sequence[str], flag: str) -> Mapping[str, RequiredHeader]:
    """What each API that is restricted asks for. `groups`: `<api>[,<api>]:<key>=<value>`.

    Raises:
        InvalidArgument: one is malformed (its value is not told), or restricts what is restricted already.
    """
    tolls: dict[str, RequiredHeader] = {}
    for group in groups:
        names, colon, rest = group.partition(":")
        key, equals, value = rest.partition("=")
        if not (colon and equals and key and value):
            raise InvalidArgument(f"{flag} must be <api>[,<api>]:<key>=<value>, got one that begins '{names}'")
        for name in names.split(","):
            _check_api(name, tolls, flag)
            tolls[name] = RequiredHeader(key, value)
    return tolls


def _check_api(name: str, known: Iterable[str], flag: str) -> None:
    """In tritonserver's words: it calls parts as the end of its flag does, api or protocol."""
    what = f"restricted {flag.rpartition('-')[2]} '{name}'"
    if name not in APIS:
        raise InvalidArgument(f"{flag}: unknown {what}, there are {', '.join(APIS)}")
    if name in known:
        raise InvalidArgument(f"{flag}: {what} can not be specified in multiple config groups")


class RestrictedApiMiddleware:
    """Answers 403 in place of `app`, before anything of a body is read."""

    def __init__(self, app: ASGIApp, tolls: Mapping[str, RequiredHeader]) -> None:
        self._app = app
        self._tolls = tolls

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app, toll = self._app, self._toll(scope)
        if toll is not None and not toll.matches(_header(scope, toll.key)):
            error = Unauthenticated(f"This API is restricted, expecting header '{toll.key}'")
            record_error(error)
            app = json_response(v2_error_body(error), 403)
        await app(scope, receive, send)

    def _toll(self, scope: Scope) -> RequiredHeader | None:
        found = _API.fullmatch(scope["path"]) if scope["type"] == "http" else None
        return None if found is None else self._tolls.get(_api_of(found))


def _api_of(found: re.Match[str]) -> str:
    return next(name for name in APIS if found[name.replace("-", "_")] is not None)


def _header(scope: Scope, key: str) -> str | None:
    wanted = key.lower().encode()
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), None)
