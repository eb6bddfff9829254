"""The id of an HTTP request, `X-Request-Id`: the client's, or a made-up one on OpenAI's paths, whose package shows it.

The response carries it, and so does the request's record.
"""

from uuid import uuid4

from starlette.types import Scope, Send

from .direct import add_response_header
from .error_responses import is_openai_path

_HEADER = b"x-request-id"
_KEY = "charonia.request_id"
_LONGEST = 256
"""Bytes that are kept of a client's id."""


def with_request_id(scope: Scope, send: Send) -> Send:
    """Note the request's id in the scope, if it has one; the `send` that adds it to the response."""
    given: bytes = dict(scope["headers"]).get(_HEADER, b"")[:_LONGEST]
    if not given:
        if not is_openai_path(scope["path"]):
            return send
        given = uuid4().hex.encode()
    scope[_KEY] = given
    return add_response_header(scope, send, _HEADER, given)


def request_id_of(scope: Scope) -> str:
    """The request's id; empty if it has none."""
    given: bytes = scope.get(_KEY, b"")
    return given.decode(errors="replace")
