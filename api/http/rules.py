"""The rules of the HTTP endpoints, from flags that are understood: access, forwarded headers, origins, patience."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...core.errors import InvalidArgument
from ..header_forwarding import HeaderForwarding
from ..restricted_apis import RequiredHeader
from ..size_limits import BODY_TIMEOUT

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#@*]+")


@dataclass(frozen=True, slots=True)
class HttpRules:
    """`forwarding`: headers that models get; `required_headers`: of restricted APIs, by API; `allowed_origins`: of web
    pages that may ask; `body_timeout`: seconds to wait for the next piece of a body."""

    forwarding: HeaderForwarding = field(default_factory=HeaderForwarding)
    required_headers: Mapping[str, RequiredHeader] = field(default_factory=dict)
    allowed_origins: tuple[str, ...] = ()
    body_timeout: float = BODY_TIMEOUT


def parse_allowed_origins(given: Sequence[str]) -> tuple[str, ...]:
    """The origins of `--allowed-origins`: each as it is, or several as a JSON list, as vLLM takes them.

    Raises:
        InvalidArgument: a text is no origin, and would never be equal to one that a browser sends.
    """
    origins: list[str] = []
    for text in given:
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
