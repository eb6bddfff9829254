"""Requests of commands that look at a server: a header of the command line, and one request over HTTP."""

import json
from collections.abc import Mapping
from contextlib import suppress
from http.client import HTTPException
from urllib.error import HTTPError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from ..core.errors import InvalidArgument, Unavailable

_SECONDS = 30.0
_REASON = 300
"""Characters of a refusal that are shown where it is no JSON of ours: a page, say."""


def parse_header(header: str) -> dict[str, str]:
    """The header of a flag, as NAME: VALUE; none for an empty text. Raises `InvalidArgument` for another form."""
    name, colon, value = header.partition(":")
    if header and not colon:
        raise InvalidArgument(f"--header must be NAME: VALUE, got '{header}'")
    return {name.strip(): value.strip()} if header else {}


def check_url(url: str) -> None:
    """Raises `InvalidArgument` unless it is one over HTTP."""
    try:
        parts = urlsplit(url)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is none, or half an IPv6 address
        good = False
    if not good:
        raise InvalidArgument(f"--url must be http://HOST:PORT, got '{url}'")


class ServerRefused(Unavailable):
    """The server answered with an error; `reason` is its own words, in a line."""

    def __init__(self, url: str, status: int, text: str) -> None:
        self.status, self.reason = status, " ".join(text.split())[:_REASON]
        with suppress(ValueError, KeyError, TypeError):
            self.reason = str(json.loads(text)["error"])
        super().__init__(f"{url}: {status} {self.reason}")


def fetch(
    url: str,
    headers: Mapping[str, str],
    body: bytes | None = None,
    method: str | None = None,
    seconds: float = _SECONDS,
) -> bytes:
    """The body of the response. `method`: else POST with a body, and GET without. `seconds`: that the server may be
    silent.

    Raises:
        ServerRefused: the response is an error.
        Unavailable: there is none.
    """
    try:
        with urlopen(Request(url, body, dict(headers), method=method), timeout=seconds) as answer:
            whole: bytes = answer.read()
            return whole
    except HTTPError as error:
        with error:
            raise ServerRefused(url, error.code, error.read(1000).decode(errors="replace")) from None
    except HTTPException as error:
        raise Unavailable(f"{url}: what answers speaks no HTTP, or broke off: {error!r}") from None
    except (OSError, ValueError) as error:
        raise Unavailable(f"{url}: {getattr(error, 'reason', error)}") from None
