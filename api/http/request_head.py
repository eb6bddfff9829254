"""The head of an HTTP request: its limits, its target and which protocol that is of, the offers in it that are not
taken up, and refusals of it."""

import asyncio
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from http import HTTPStatus
from typing import NamedTuple
from urllib.parse import unquote

from httptools import parse_url
from starlette.types import Scope

MAX_HEAD_BYTES = 64 * 1024
"""Limit of a request's head, and of the trailers and chunk extensions of its body."""
MAX_HEADERS = 128
MAX_CHUNKS = 65536
"""Chunks of a request's body that are not empty, as many as tritonserver takes."""

_LINGER_SECONDS = 2.0
_SHOWN_BYTES = 100
_CACHED_TARGETS = 256
_LONGEST_CACHED_TARGET = 256
_CONTROL_CHARACTER = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_UPGRADE_TOKENS = {b"upgrade", b"http2-settings"}
_VERSIONS = ("1.1", "1.0")
_HEADER_MAP = "charonia.headers"
_FRAMING_HEADERS = frozenset((b"host", b"te", b"transfer-encoding"))


class HttpProtocolError(Exception):
    """Raised in callbacks of the parser: the bytes become no request, and are answered with `status`.
    `client_still_sends`: the connection stays open for a while, or the client would lose the answer."""

    def __init__(self, status: HTTPStatus, text: str, client_still_sends: bool = False) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.client_still_sends = client_still_sends

    def answer(self, status_line: bytes) -> bytes:
        """The whole response: JSON, after which the connection closes."""
        body = json.dumps({"error": self.text}, separators=(",", ":")).encode()
        head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
        return status_line + head + body


def head_too_large() -> HttpProtocolError:
    text = f"the request's head exceeds the maximum of {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers"
    return HttpProtocolError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text, client_still_sends=True)


def too_many_chunks() -> HttpProtocolError:
    text = f"Chunked request body exceeds maximum of {MAX_CHUNKS} non-empty chunks. Send fewer or larger HTTP chunks."
    return HttpProtocolError(HTTPStatus.BAD_REQUEST, text, client_still_sends=True)


def check_framing(version: str, headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raises `HttpProtocolError` for a head that a proxy in front may read in another way than we do.

    They may differ on where the request ends, or whom it is for (RFC 9112, 2.3, 3.2 and 6.1). Without this check, a
    body in another encoding than chunks would be read to the connection's end.
    """
    if version not in _VERSIONS:
        raise _bad_request(f"its version is HTTP/{version}, and has to be HTTP/1.1 or HTTP/1.0")
    hosts = codings = 0
    for name, value in headers:
        if name not in _FRAMING_HEADERS:
            continue
        if name == b"host":
            hosts += 1
        elif name == b"te":  # which may tell of codings of the response that the client knows, of chunks besides never
            tokens = value.lower().replace(b" ", b"").split(b",")
            if b"chunked" in tokens and len(tokens) > 1:
                raise _bad_request("its TE names chunked with other codings")
        else:
            codings += 1
            if value.strip().lower() != b"chunked" or codings > 1 or version == "1.0":
                shown = value[:_SHOWN_BYTES].decode("latin-1")
                raise _bad_request(f"its Transfer-Encoding must be chunked, once and in HTTP/1.1, got {shown!r}")
    if hosts > 1 or (not hosts and version == "1.1"):
        raise _bad_request(f"it has {hosts} Host headers, and has to have one")


def _bad_request(problem: str) -> HttpProtocolError:
    return HttpProtocolError(HTTPStatus.BAD_REQUEST, f"Invalid HTTP request received: {problem}")


def head_size(url: bytes, headers: Sequence[tuple[bytes, bytes]]) -> int:
    """Bytes of a request's head, but for its method and version."""
    return len(url) + sum(len(name) + len(value) + 4 for name, value in headers)


def header_map(scope: Scope) -> Mapping[bytes, bytes]:
    """The headers of a request by their names, of repeated ones the last; made once."""
    headers: Mapping[bytes, bytes] | None = scope.get(_HEADER_MAP)
    if headers is None:
        headers = scope[_HEADER_MAP] = dict(scope["headers"])
    return headers


class RequestTarget(NamedTuple):
    """The target of a request line, as ASGI scopes have it."""

    path: str
    raw_path: bytes
    query: bytes


def parse_target(url: bytes) -> RequestTarget:
    """Short targets are parsed once: clients ask for the same few. Raises `HttpProtocolError` for an escaped control
    character in the path: to many a pattern a line break is an end."""
    return _parse_cached(url) if len(url) < _LONGEST_CACHED_TARGET else _parse(url)


def _parse(url: bytes) -> RequestTarget:
    parsed = parse_url(url)
    path = parsed.path.decode("ascii")
    if "%" in path:
        path = unquote(path)
        if _CONTROL_CHARACTER.search(path):
            raise HttpProtocolError(HTTPStatus.BAD_REQUEST, "the path has a control character in it")
    return RequestTarget(path, parsed.path, parsed.query or b"")


_parse_cached = lru_cache(_CACHED_TARGETS)(_parse)


_OPENAI_PATHS = (
    "/v1/",
    "/v2/rerank",
    "/rerank",
    "/tokenize",
    "/detokenize",
    "/score",
    "/classify",
    "/pooling",
    "/invocations",
    "/server_info",
    "/model_info",
)


def is_openai_path(path: str) -> bool:
    """Whether errors on `path` have OpenAI's form or Anthropic's, and not v2's."""
    return path.startswith(_OPENAI_PATHS)


def is_anthropic_path(path: str) -> bool:
    """Whether `path` is of Anthropic's API, with its form of errors and its header for keys."""
    return path == "/v1/messages" or path.startswith("/v1/messages/")


def head_without_upgrade(method: bytes, url: bytes, version: str, headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """The head of a request as it would be without its offer to speak another protocol."""
    kept = []
    for name, value in headers:
        if name == b"connection":
            tokens = [token.strip() for token in value.split(b",")]
            kept.append((name, b", ".join(token for token in tokens if token.lower() not in _UPGRADE_TOKENS)))
        elif name not in _UPGRADE_TOKENS:
            kept.append((name, value))
    lines = b"".join([b"%b: %b\r\n" % header for header in kept])
    return b"%b %b HTTP/%b\r\n%b\r\n" % (method, url, version.encode(), lines)


class LingeringConnection(asyncio.Protocol):
    """A connection after its last answer: takes what the client still sends, for a while."""

    def __init__(self, before: asyncio.Protocol, transport: asyncio.Transport) -> None:
        self._before = before
        self._closing = asyncio.get_running_loop().call_later(_LINGER_SECONDS, transport.close)

    def connection_lost(self, error: Exception | None) -> None:
        self._closing.cancel()
        self._before.connection_lost(error)
