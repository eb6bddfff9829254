"""What the flags of HTTP alone come to, once they are understood."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from .cors import read_origins
from .forwarding import Forwarding
from .http_options import HttpOptions
from .restricted import Toll, read_restrictions


@dataclass(frozen=True, slots=True)
class HttpRules:
    """`forwarding`: which headers models get; `tolls`: what restricted APIs ask for; `origins`: whose pages may ask."""

    forwarding: Forwarding = field(default_factory=Forwarding)
    tolls: Mapping[str, Toll] = field(default_factory=dict)
    origins: tuple[str, ...] = ()


def read_rules(options: HttpOptions) -> HttpRules:
    """Raises `InvalidArgument` for a flag that means nothing."""
    tolls = read_restrictions(options.http_restricted_api, "--http-restricted-api")
    return HttpRules(Forwarding(options.http_header_forward_pattern), tolls, read_origins(options.allowed_origins))
