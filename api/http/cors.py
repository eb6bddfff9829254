"""Which web pages may ask: `--allowed-origins`. Knows no endpoint.

A browser shows the answer to a page of another origin only where the server's headers allow it, and asks before it
sends JSON or a key (https://fetch.spec.whatwg.org/#http-cors-protocol). Other clients do as they like: this protects
nothing.
"""

import json
import re
from collections.abc import Iterator, Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from ...core.errors import InvalidArgument

_ORIGIN = re.compile(r"\*|[a-z][a-z0-9+.-]*://[^/\s?#@*]+")
_EXPOSED = ("endpoint-load-metrics", "inference-header-content-length", "retry-after", "x-request-id")
"""Headers of answers that a page could not read otherwise."""


def parse_allowed_origins(given: Sequence[str]) -> tuple[str, ...]:
    """The origins that are meant: each as it is, or several as a JSON list, as vLLM takes them.

    Raises:
        InvalidArgument: one is none, and would never be equal to what a browser says.
    """
    origins = tuple(origin for text in given for origin in _listed(text))
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            message = f"--allowed-origins: '{origin}' is no origin; one is *, or as in https://app.example:8443"
            raise InvalidArgument(message)
    return origins


def _listed(text: str) -> Iterator[str]:
    try:
        listed = json.loads(text) if text.startswith("[") else [text]
    except ValueError:
        listed = [text]
    yield from map(str, listed)


def cors_middleware(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """`app`, for pages of these `origins` too."""
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=_EXPOSED,
    )
