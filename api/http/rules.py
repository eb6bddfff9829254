"""What the flags of HTTP alone come to, once they are understood."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from ...cli.http_options import HttpOptions
from ..header_forwarding import HeaderForwarding
from ..restricted_apis import RequiredHeader, read_restrictions
from ..size_limits import BODY_TIMEOUT
from .cors import parse_allowed_origins


@dataclass(frozen=True, slots=True)
class HttpRules:
    """`forwarding`: which headers models get; `tolls`: what restricted APIs ask for; `origins`: whose pages may ask;
    `body_timeout`: seconds to wait for the next piece of a body."""

    forwarding: HeaderForwarding = field(default_factory=HeaderForwarding)
    required_headers: Mapping[str, RequiredHeader] = field(default_factory=dict)
    allowed_origins: tuple[str, ...] = ()
    body_timeout: float = BODY_TIMEOUT


def parse_http_rules(options: HttpOptions) -> HttpRules:
    """Raises `InvalidArgument` for a flag that means nothing."""
    tolls = read_restrictions(options.http_restricted_api, "--http-restricted-api")
    forwarding, origins = (
        HeaderForwarding(options.http_header_forward_pattern),
        parse_allowed_origins(options.allowed_origins),
    )
    return HttpRules(forwarding, tolls, origins, options.http_body_timeout_secs)
