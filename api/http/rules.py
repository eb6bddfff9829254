"""What flags say of HTTP, and how they name hosts and the origins of web pages."""

import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address
from pathlib import Path
from typing import NamedTuple

from ...core.errors import InvalidArgument
from ...core.extension_contracts import PathAccess
from ..gateway_headers import GatewayHeaders
from ..header_rules import HeaderForwarding, RequiredHeader, restricted_api_of
from ..size_limits import BODY_TIMEOUT

ANY = "*"
"""Stands for any host's name, and any origin."""

_OPEN = re.compile(r"/health|/ping|/v2/health/(live|ready)|/v2/models/[^/]+(/versions/[^/]+)?/ready", re.DOTALL)
_DOCS = r"|/docs|/openapi\.json"
_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#@*]+")
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^:\[\]]*)(:(?P<port>[0-9]{1,5}))?")
_HOST_NAME = re.compile(r"[A-Za-z0-9_.-]+")


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
