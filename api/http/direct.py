"""The way past ASGI's messages for what is complete: a body that has come whole, a response that is made whole.

Our HTTP protocol offers it as the extension `charonia.direct` of the scope; under another server, and in tests without
one, there is none, and requests and responses are messages. Middleware needs not know of it: where `send` or `receive`
was replaced, the way is closed. Middleware that adds nothing but a header keeps it open by `add_response_header`.
"""

from collections.abc import Awaitable, Sequence
from typing import Protocol

from starlette.types import Message, Receive, Scope, Send

EXTENSION = "charonia.direct"


class DirectCycle(Protocol):
    """One request and its response, as the HTTP protocol keeps them.

    `direct_send`: what stands for the cycle's own `send`, None for that itself. `direct_headers`: lines that it adds.
    """

    direct_send: Send | None
    direct_headers: bytes
    response_started: bool

    async def receive(self) -> Message: ...

    async def send(self, message: Message) -> None: ...

    def take_complete_body(self) -> bytes | None:
        """The body, if all of it has come; it is not received then."""

    def send_complete_response(self, head: bytes, parts: Sequence[bytes | memoryview]) -> bool:
        """Send a response of status 200; False if messages have to do it."""


def _cycle_of(scope: Scope) -> DirectCycle | None:
    extensions = scope.get("extensions")
    cycle: DirectCycle | None = extensions.get(EXTENSION) if extensions else None
    return cycle


def take_complete_body(scope: Scope, receive: Receive) -> bytes | None:
    """The request's body, if all of it has come and `receive` would give it unchanged; it is not received then."""
    cycle = _cycle_of(scope)
    return None if cycle is None or receive != cycle.receive else cycle.take_complete_body()


def send_complete_response(scope: Scope, send: Send, head: bytes, parts: Sequence[bytes | memoryview]) -> bool:
    """Send a whole response of status 200: the lines of its headers, content-length among them, and its body.

    False: nothing was sent, as `send` would change it, or the access log or a slow reader wants messages.
    """
    cycle = _cycle_of(scope)
    if cycle is None or not _is_own(cycle, send):
        return False
    return cycle.send_complete_response(head + cycle.direct_headers, parts)


def _is_own(cycle: DirectCycle, send: Send) -> bool:
    return send == cycle.send if cycle.direct_send is None else send is cycle.direct_send


def add_response_header(scope: Scope, send: Send, name: bytes, value: bytes) -> Send:
    """A `send` that adds a header to the response, and to one that is sent past it."""

    # No coroutine of its own: it would cost every frame of every stream.
    def send_with_header(message: Message) -> Awaitable[None]:
        if message["type"] == "http.response.start":
            message["headers"] = [*message.get("headers", ()), (name, value)]
        return send(message)

    cycle = _cycle_of(scope)
    if cycle is not None and _is_own(cycle, send):
        cycle.direct_send = send_with_header
        cycle.direct_headers += b"%b: %b\r\n" % (name, value)
    return send_with_header


def response_started(scope: Scope) -> bool:
    """The status of the response may be on its way; True only where the protocol tells."""
    cycle = _cycle_of(scope)
    return cycle is not None and cycle.response_started
