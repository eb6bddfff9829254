"""What commands that look at a server ask it by: a header of the command line, and one request over HTTP."""

from collections.abc import Mapping
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


def fetch(url: str, headers: Mapping[str, str], body: bytes | None = None) -> bytes:
    """The body of the response. Raises `Unavailable` if the server does not answer, or refuses; the message has what it
    said."""
    try:
        with urlopen(Request(url, body, dict(headers)), timeout=_SECONDS) as answer:
            whole: bytes = answer.read()
            return whole
    except HTTPError as error:
        with error:
            raise Unavailable(f"{url}: {error.code} {error.read(1000).decode(errors='replace')}") from None
    except (URLError, OSError, ValueError) as error:
        raise Unavailable(f"{url}: {error}") from None
