"""What a client calls its request over HTTP, or what we call it for clients that look for that: `X-Request-Id`.

Answers carry it, the request's record too. Knows which paths have such clients: OpenAI's package shows it with errors.
"""

from collections.abc import Awaitable
from uuid import uuid4

from starlette.types import Message, Scope, Send

from .error_responses import is_openai_path

_HEADER = b"x-request-id"
_KEY = "charonia.request_id"
_LONGEST = 256
"""Bytes that are kept of a client's."""


def with_request_id(scope: Scope, send: Send) -> Send:
    """Give the request its id, if it has one; what is sent by the result carries it."""
    given: bytes = dict(scope["headers"]).get(_HEADER, b"")[:_LONGEST]
    if not given:
        if not is_openai_path(scope["path"]):
            return send
        given = uuid4().hex.encode()
    scope[_KEY] = given

    # No coroutine of its own: each would cost every frame of every stream.
    def sent(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (_HEADER, given)]
        return send(message)

    return sent


def request_id_of(scope: Scope) -> str:
    """As the client sent it or we made it up; empty if neither."""
    given: bytes = scope.get(_KEY, b"")
    return given.decode(errors="replace")


def request_id_header_line(scope: Scope) -> bytes:
    """The header of an answer that goes past `send`, if there is to be one."""
    given = scope.get(_KEY)
    return b"" if given is None else b"x-request-id: %b\r\n" % given
