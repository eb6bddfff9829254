"""Access to the HTTP endpoints: the rules from flags, and the middleware for API keys and restricted parts of v2."""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from ...core.errors import CharoniaError, InvalidArgument, Unauthenticated
from ...core.extension_contracts import PathAccess
from ..api_keys import Keyring, bearer, same_key
from ..gateway_headers import GatewayHeaders
from ..header_rules import HeaderForwarding, RequiredHeader, restricted_api_of
from ..size_limits import BODY_TIMEOUT
from .error_responses import anthropic_error_body, error_response, json_response, v2_error_body
from .request_context import record_error, record_hints, record_tenant
from .request_head import is_anthropic_path
from .web_pages import WebPageRules

_OPEN = re.compile(r"/health|/ping|/v2/health/(live|ready)|/v2/models/[^/]+(/versions/[^/]+)?/ready", re.DOTALL)
_DOCS = r"|/docs|/openapi\.json"
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#@*]+")


@dataclass(frozen=True, slots=True)
class HttpRules:
    """What flags say of HTTP, and who may ask what."""

    forwarding: HeaderForwarding = field(default_factory=HeaderForwarding)
    """The headers that models get."""
    required_headers: Mapping[str, RequiredHeader] = field(default_factory=dict)
    """By the name of a restricted part of the API, the header that its requests must have."""
    allowed_origins: tuple[str, ...] = ()
    """The origins of web pages that may ask."""
    body_timeout: float = BODY_TIMEOUT
    """Seconds to wait for the next piece of a body."""
    lora_root: Path | None = None
    """The directory that requests may load adapters from; None where they may not."""
    allowed_hosts: Collection[str] = ()
    """Names of this server, `*` for any."""
    extensions: tuple[PathAccess, ...] = ()
    """Who may ask what extensions serve."""
    api_docs: bool = False
    """Whether there is a page about the endpoints, at `/docs`."""
    gateway: GatewayHeaders = field(default_factory=GatewayHeaders)
    """The headers of a gateway that are believed."""

    @property
    def web_pages(self) -> WebPageRules:
        private = [access.path for access in self.extensions if access.is_private]
        return WebPageRules(self.allowed_hosts, self.allowed_origins, private)

    @property
    def open_paths(self) -> re.Pattern[str]:
        """Paths that need no key: a browser shows none when it opens a page."""
        more = [f"|{re.escape(access.path)}(/.*)?" for access in self.extensions if not access.needs_key]
        return re.compile(_OPEN.pattern + (_DOCS if self.api_docs else "") + "".join(more), re.DOTALL)

    def restricted_api_of(self, path: str) -> str:
        """The part of v2 that an HTTP path belongs to; empty for a path that cannot be restricted."""
        for access in self.extensions:
            if access.restricted_api and f"{path}/".startswith(f"{access.path}/"):
                return access.restricted_api
        return restricted_api_of(path) or ""


def parse_allowed_origins(flags: Sequence[str]) -> tuple[str, ...]:
    """The origins of `--allowed-origins`: each as it is, or several as a JSON list, as vLLM takes them. Raises
    `InvalidArgument` for a text that is no origin, and would never be equal to one that a browser sends."""
    origins: list[str] = []
    for text in flags:
        try:
            listed = json.loads(text) if text.startswith("[") else [text]
        except ValueError:
            listed = [text]
        origins += map(str, listed)
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            message = f"--allowed-origins: '{origin}' is no origin; one is *, or as in https://app.example:8443"
            raise InvalidArgument(message)
    return tuple(origins)


class AccessMiddleware:
    """Refuses requests before a body is read: 401 without a key, 403 without the header that a restricted API requires.

    Health needs no key. The tenant of a key is noted in the request's context. A request that needs neither key nor
    header is held to the rules for web pages.
    """

    def __init__(self, app: ASGIApp, keys: Keyring, rules: HttpRules) -> None:
        self._app = app
        self._keys = keys or None
        self._required, self._api_of = rules.required_headers, rules.restricted_api_of
        self._pages, self._open = rules.web_pages, rules.open_paths
        self._gateway = rules.gateway or None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self._app
        required = self._required.get(self._api_of(scope["path"])) if self._required else None
        try:
            if self._keys is None:
                if required is None:
                    self._pages.check(scope)
            elif not self._open.fullmatch(scope["path"]):
                record_tenant(scope, self._keys.authenticate(_shown_key(scope)))
            if self._gateway is not None:
                record_hints(scope, self._gateway, has_key=self._keys is not None)
        except CharoniaError as error:
            record_error(scope, error)
            app = error_response(error, scope["path"])
        else:
            shown = [] if required is None else _values(scope, required.key.lower().encode())
            if required is not None and not required.matches(shown[0] if shown else None):
                refusal = Unauthenticated(f"This API is restricted, expecting header '{required.key}'")
                record_error(scope, refusal)
                is_anthropic = is_anthropic_path(scope["path"])
                app = json_response(anthropic_error_body(refusal, 403) if is_anthropic else v2_error_body(refusal), 403)
        await app(scope, receive, send)


def _shown_key(scope: Scope) -> str | None:
    """The key that a request shows, as an `authorization` header has it; Anthropic's paths also take `x-api-key`.

    Raises `InvalidArgument` for several: a proxy in front may have checked another one than is taken here.
    """
    shown = _values(scope, b"authorization")
    if len(shown) > 1:
        raise InvalidArgument(f"{len(shown)} Authorization headers: send one")
    keys = _values(scope, b"x-api-key") if is_anthropic_path(scope["path"]) else []
    if len(keys) > 1:
        raise InvalidArgument(f"{len(keys)} x-api-key headers: send one")
    if keys and shown and not same_key(shown[0], keys[0]):
        raise InvalidArgument("the headers Authorization and x-api-key have different keys: send one")
    return next(iter((*shown, *map(bearer, keys))), None)


def _values(scope: Scope, name: bytes) -> list[str]:
    return [value.decode("latin-1") for header, value in scope["headers"] if header == name]
