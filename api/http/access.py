"""Access to the HTTP endpoints, judged before a body is read: keys, restricted parts of v2, and what web pages may do
where no keys protect the server."""

import socket
from collections.abc import Mapping
from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send

from ...core.errors import CharoniaError, InvalidArgument, Unauthenticated
from ..api_keys import Keyring, bearer, same_key
from .error_responses import ApiError, anthropic_error_body, error_response, json_response, v2_error_body
from .request_context import record_error, record_hints, record_tenant
from .request_head import header_map, is_anthropic_path
from .rules import ANY, HostPort, HttpRules, parse_address, plain_name

_PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".svc", ".home.arpa", ".lan")
"""Ends of names that nobody can own in the public DNS: of machines nearby, containers and services of a cluster."""

_SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
_FOREIGN_SITES = (b"cross-site", b"same-site")
_FORM_TYPES = frozenset(("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"))
"""Types of a body that a browser sends to any server without asking it."""

_DEFAULT_PORTS = {"http": 80, "https": 443}


class AccessMiddleware:
    """Refuses requests before a body is read: 401 without a key, 403 without the header that a restricted API requires.

    Health needs no key. The tenant of a key is noted in the request's context. A request that needs neither key nor
    header is held to the rules for web pages.
    """

    def __init__(self, app: ASGIApp, keys: Keyring, rules: HttpRules) -> None:
        self._app = app
        self._keys = keys or None
        self._required, self._api_of = rules.required_headers, rules.restricted_api_of
        self._pages, self._open = WebPageRules(rules), rules.open_paths
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


class WebPageRules:
    """What web pages may do.

    A browser asks beforehand only where no form could make the request: see
    https://fetch.spec.whatwg.org/#http-cors-protocol. A page may also let its own name lead here (DNS rebinding). Other
    clients send no `Origin`, and pass.
    """

    def __init__(self, rules: HttpRules) -> None:
        self._hosts = frozenset((*rules.allowed_hosts, plain_name(socket.gethostname())))
        """Names of this server, beside those that can be nobody else's."""
        self._origins = frozenset(rules.allowed_origins)
        self._private = tuple(access.path for access in rules.extensions if access.is_private)
        """Beginnings of paths with clients' data."""

    def check(self, scope: Scope) -> None:
        """Raises `ApiError` with status 403 or 415 for what a page must not ask.

        403: a change of this server, or private data, under an unknown host name or of a page from elsewhere; and a
        page's request under a name that leads here by a trick. 415: a form of a page from elsewhere.
        """
        headers = header_map(scope)
        method = scope["method"]
        path = scope["path"]
        origin = headers.get(b"origin")
        protected = is_protected(method, path) or path.startswith(self._private)
        if origin is None and not protected and headers.get(b"sec-fetch-site") not in _FOREIGN_SITES:
            return
        host = HostPort.of_header(headers.get(b"host", b""))
        changes = method not in _SAFE_METHODS
        foreign = changes and self._is_foreign(origin, headers, protected)
        page = _page_name(origin)
        if foreign and protected:
            raise ApiError(f"{page} may not change this server: --allowed-origins names those that may", 403)
        media = headers.get(b"content-type", b"").decode("latin-1").partition(";")[0].strip().lower()
        if foreign and media in _FORM_TYPES:
            raise ApiError(f"{page} must send 'Content-Type: application/json' (or be of --allowed-origins)", 415)
        # Behind a proxy, a name that leads here is another server's, and so is its port.
        direct = (
            changes and origin is not None and not foreign and (host.port or 80) == (scope.get("server") or (0, 0))[1]
        )
        if (protected or direct) and host.name and not self._knows(host.name):
            raise ApiError(f"this server is not known under the host name '{host.name}'; --allowed-hosts adds it", 403)

    def _knows(self, name: str) -> bool:
        if name in self._hosts or ANY in self._hosts or parse_address(name) is not None:
            return True  # no page can make an address lead here
        return "." not in name or name.endswith(_PRIVATE_SUFFIXES)

    def _is_foreign(self, origin: bytes | None, headers: Mapping[bytes, bytes], protected: bool) -> bool:
        """Whether the request is of a page from elsewhere that is not allowed."""
        if ANY in self._origins and not protected:
            return False
        if origin is None:
            return headers.get(b"sec-fetch-site") in _FOREIGN_SITES
        text = origin.decode("latin-1")
        if text in self._origins:
            return False
        try:
            page = urlsplit(text)
            name, default = plain_name(page.hostname or ""), _DEFAULT_PORTS.get(page.scheme)
            port = page.port or default
        except ValueError:
            return True
        if not name or default is None:
            return True
        # A proxy may have put its own name into Host; a page from elsewhere cannot set the other header unasked.
        shown = (HostPort.of_header(headers[key]) for key in (b"host", b"x-forwarded-host") if key in headers)
        return name not in self._hosts and all((host.name, host.port or default) != (name, port) for host in shown)


def _page_name(origin: bytes | None) -> str:
    """The words of a refusal for a page."""
    named = "" if origin is None else ascii(origin.decode("latin-1")[:200])
    return f"a web page of the origin {named}" if named else "a web page of another site"


def is_protected(method: str, path: str) -> bool:
    """Whether a request changes the server."""
    if method in _SAFE_METHODS:
        return False
    if path.startswith("/v2/models/"):
        return path.endswith("/trace/setting")
    if path.startswith("/v2/"):
        return path != "/v2/rerank" and not path.endswith("/index")
    return path.endswith("_lora_adapter")
