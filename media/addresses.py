"""Which addresses of the network a URL of a client's may lead to: only those that anybody on the internet can reach."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address
from typing import TypeAlias
from urllib.parse import SplitResult, urlsplit

from ..core.errors import InvalidArgument, shorten

Address: TypeAlias = IPv4Address | IPv6Address
Resolve: TypeAlias = Callable[[str, int], Sequence[str]]
"""The addresses of a host and port, as text. May take long. Raises `OSError`."""

_PORTS = {"http": 80, "https": 443}
_NAT64 = tuple(IPv6Network(network) for network in ("64:ff9b::/96", "64:ff9b:1::/48"))
_COMPATIBLE = IPv6Network("::/96")
_LONGEST_URL = 8192


@dataclass(frozen=True, slots=True)
class WebTarget:
    """Where a URL leads."""

    url: SplitResult
    host: str
    port: int

    @property
    def path(self) -> str:
        """What a request asks for."""
        return (self.url.path or "/") + (f"?{self.url.query}" if self.url.query else "")


def is_public(address: Address) -> bool:
    """Whether an address is one of the public internet, in whatever form an IPv6 address may hide one of IPv4."""
    if isinstance(address, IPv6Address):
        if (inner := _embedded(address)) is not None:
            return is_public(inner)
        if address.scope_id or address.is_site_local:
            return False
    return address.is_global and not (address.is_multicast or address.is_reserved or address.is_unspecified)


def _embedded(address: IPv6Address) -> IPv4Address | None:
    """The IPv4 address that a host or a gateway would take an IPv6 address for."""
    if address.ipv4_mapped is not None or address.sixtofour is not None:
        return address.ipv4_mapped or address.sixtofour
    if address.teredo is not None:
        return address.teredo[1]
    if any(address in network for network in _NAT64) or (address in _COMPATIBLE and int(address) > 1):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return None


def parse_web_url(text: str, domains: frozenset[str]) -> WebTarget:
    """Where a URL leads. Raises `InvalidArgument` unless it is http or https, on the scheme's own port, without
    credentials, and its host is one of `domains` or below one; `*` is any."""
    if len(text) > _LONGEST_URL or not text.isascii() or not text.isprintable() or " " in text or "\\" in text:
        raise InvalidArgument(f"the URL must be at most {_LONGEST_URL} printable ASCII characters")
    try:
        url = urlsplit(text)
        port = url.port or _PORTS.get(url.scheme, 0)
        host = (url.hostname or "").rstrip(".")
    except ValueError as error:
        raise InvalidArgument(f"the URL cannot be read: {error}") from error
    if url.scheme not in _PORTS or not host:
        raise InvalidArgument(f"{shorten(text)!r} is no URL of http or https")
    if "@" in url.netloc:
        raise InvalidArgument("a URL may not have credentials")
    if port != _PORTS[url.scheme]:
        raise InvalidArgument(f"port {port} is not allowed, only {_PORTS[url.scheme]} for {url.scheme}")
    if "*" not in domains and not any(host == domain or host.endswith("." + domain) for domain in domains):
        raise InvalidArgument(f"images may not be fetched from {shorten(host)}: --media-domains does not name it")
    return WebTarget(url, host, port)


def public_addresses(target: WebTarget, resolve: Resolve) -> list[str]:
    """The addresses of a host, none of which may be other than public: one that is might be taken on the next try.

    Raises:
        InvalidArgument: the host is unknown, or leads elsewhere.
    """
    try:
        answers = list(dict.fromkeys(resolve(target.host, target.port)))
    except (OSError, UnicodeError) as error:
        raise InvalidArgument(f"the host {shorten(target.host)} is not found: {error}") from error
    if not answers:
        raise InvalidArgument(f"the host {shorten(target.host)} has no address")
    for text in answers:
        try:
            public = is_public(ip_address(text))
        except ValueError:
            public = False
        if not public:  # the address is not told: clients would learn what the network inside looks like
            raise InvalidArgument(f"the host {shorten(target.host)} is not on the public internet")
    return answers
