"""What cannot become a request is refused below ASGI, in JSON: framing errors, heads and trailers without end.

Knows what the parser tells; nothing of applications.
"""

import asyncio
import json
from http import HTTPStatus

from httptools import HttpParserError
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 128
"""Of a request's head, and of what follows its last chunk."""

_LINGER_SECONDS = 2.0
"""A client that still sends would lose the answer if the connection closed at once."""


class HttpProtocolError(Exception):
    """Raised in the parser's callbacks: no request comes of this. `goes_on`: the client may be far from its end."""

    def __init__(self, status: HTTPStatus, text: str, goes_on: bool = False) -> None:
        super().__init__(text)
        self.status, self.text, self.goes_on = status, text, goes_on


def head_too_large() -> HttpProtocolError:
    text = f"the request's head exceeds the maximum of {MAX_HEAD_BYTES} bytes or {MAX_HEADERS} headers"
    return HttpProtocolError(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, text, goes_on=True)


class ErrorAnsweringProtocol(HttpToolsProtocol):
    """Answers what is refused, and closes the connection."""

    def answer_error(self, refused: HttpProtocolError) -> None:
        cycle, begun = self.cycle, False
        if cycle is not None and not cycle.response_complete:
            # For the application that has it, the client has left.
            cycle.disconnected, begun = True, cycle.response_started
            cycle.message_event.set()
        self.flow.resume_reading()
        if not begun:
            self.transport.write(_answer(refused))
        if refused.goes_on:
            self.transport.set_protocol(_Ending(self, self.transport))
        else:
            self.transport.close()

    def answer_parser_error(self, error: HttpParserError) -> None:
        """What the parser, or one of its callbacks, gave up."""
        cause = error.__context__
        if not isinstance(cause, HttpProtocolError):
            self.logger.warning("Invalid HTTP request received.")
            reason = str(error) or "its method is not served"
            cause = HttpProtocolError(HTTPStatus.BAD_REQUEST, f"Invalid HTTP request received: {reason}")
        self.answer_error(cause)


def _answer(refused: HttpProtocolError) -> bytes:
    body = json.dumps({"error": refused.text}, separators=(",", ":")).encode()
    head = b"content-type: application/json\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    return STATUS_LINE[refused.status] + head + body


class _Ending(asyncio.Protocol):
    """Hears the rest of what a client says, for a while, and nobody listens."""

    def __init__(self, before: asyncio.Protocol, transport: asyncio.Transport) -> None:
        self._before = before
        self._closing = asyncio.get_running_loop().call_later(_LINGER_SECONDS, transport.close)

    def connection_lost(self, error: Exception | None) -> None:
        self._closing.cancel()
        self._before.connection_lost(error)
