"""What commands that look at a server ask it by: a header of the command line, and one request over HTTP."""

import json
from collections.abc import Mapping
from contextlib import suppress
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from ..core.errors import InvalidArgument, Unavailable

_SECONDS = 30.0


def parse_header(header: str) -> dict[str, str]:
    """The header of a flag, as NAME: VALUE; none for an empty text. Raises `InvalidArgument` for another form."""
    name, colon, value = header.partition(":")
    if header and not colon:
        raise InvalidArgument(f"--header must be NAME: VALUE, got '{header}'")
    return {name.strip(): value.strip()} if header else {}


def check_url(url: str) -> None:
    """Raises `InvalidArgument` unless it is one over HTTP."""
    if urlsplit(url).scheme not in ("http", "https"):
        raise InvalidArgument(f"--url must be http://HOST:PORT, got '{url}'")


class ServerRefused(Unavailable):
    """The server answered with an error; `reason` is its own words."""

    def __init__(self, url: str, status: int, text: str) -> None:
        super().__init__(f"{url}: {status} {text}")
        self.status, self.reason = status, text
        with suppress(ValueError, KeyError, TypeError):
            self.reason = str(json.loads(text)["error"])


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
    except (URLError, OSError, ValueError) as error:
        raise Unavailable(f"{url}: {error}") from None
