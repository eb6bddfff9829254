"""Requests that web pages make: under which names this server is known, and what pages may do where no keys protect it.

A browser asks beforehand only where no form could make the request (https://fetch.spec.whatwg.org/#http-cors-protocol).
A page may also let its own name lead here (DNS rebinding). Other clients send no `Origin`, and pass.
"""

import re
import socket
from collections.abc import Collection, Iterable, Mapping
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.types import Scope

from ...core.errors import InvalidArgument
from .error_responses import ApiError
from .request_head import header_map

ANY = "*"

_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(:(?P<port>[0-9]{1,5}))?")
_HOST_NAME = re.compile(r"[A-Za-z0-9_.-]+")
_PRIVATE_SUFFIXES = (".localhost", ".local", ".internal", ".svc", ".home.arpa", ".lan")
"""Ends of names that nobody can own in the public DNS: of machines nearby, containers and services of a cluster."""

_SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
_FOREIGN_SITES = (b"cross-site", b"same-site")
_FORM_TYPES = frozenset(("", "text/plain", "application/x-www-form-urlencoded", "multipart/form-data"))
"""Types of a body that a browser sends to any server without asking it."""

_DEFAULT_PORTS = {"http": 80, "https": 443}


def plain_name(name: str) -> str:
    """A host's name, or an address, as it is compared."""
    name = name.strip("[]").rstrip(".").lower()
    address = parse_address(name)
    return name if address is None else str(getattr(address, "ipv4_mapped", None) or address)


def parse_address(text: str) -> IPv4Address | IPv6Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def is_loopback(name: str) -> bool:
    """Whether a plain name is one of the machine's own."""
    address = parse_address(name)
    return address.is_loopback if address is not None else name == "localhost" or name.endswith(".localhost")


def parse_host_names(names: Iterable[str], flag: str) -> frozenset[str]:
    """The plain names of a flag. Raises `InvalidArgument` for a name that no browser sends as a host's name."""
    for name in names:
        if not (_HOST_NAME.fullmatch(name) or parse_address(name)):
            raise InvalidArgument(f"{flag}: '{name}' is no host's name; one is as in console.example, no port")
    return frozenset(map(plain_name, names))


def parse_allowed_hosts(flags: Iterable[str]) -> frozenset[str]:
    """The names of `--allowed-hosts`, each a text of its own or with commas between; `*` stands for any. Raises as
    `parse_host_names`."""
    names = [name for text in flags for name in text.split(",")]
    if ANY in names:
        return frozenset((ANY,))
    return parse_host_names(names, "--allowed-hosts")


class HostPort(NamedTuple):
    """A plain name, empty where there is none, and a port, None for the default one of a scheme."""

    name: str = ""
    port: int | None = None

    @classmethod
    def of_header(cls, value: bytes) -> "HostPort":
        match = _HOST.fullmatch(value.decode("latin-1").strip())
        if match is None:
            return cls(value.decode("latin-1"))  # a name that is nobody's
        return cls(plain_name(match["name"]), int(match["port"]) if match["port"] else None)


class WebPageRules:
    """What pages may do.

    `hosts`: names of this server, beside those that can be nobody else's. `origins`: of pages that may ask; `*` lets
    all ask, and none change anything. `private`: beginnings of paths with clients' data.
    """

    def __init__(self, hosts: Collection[str] = (), origins: Collection[str] = (), private: Iterable[str] = ()) -> None:
        self._hosts = frozenset((*hosts, plain_name(socket.gethostname())))
        self._origins = frozenset(origins)
        self._private = tuple(private)

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
