"""A bound on the pieces of a chunked request: v2's section 3.6, below HTTP's doors.

Knows the chunks that a client made, which an ASGI application does not see any more.
"""

import asyncio
import json

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MOST = 65536
_TEXT = f"Chunked request body exceeds maximum of {MOST} non-empty chunks. Send fewer or larger HTTP chunks."
_BODY = json.dumps({"error": _TEXT}, separators=(",", ":")).encode()
_REFUSAL = (
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: application/json\r\nconnection: close\r\n"
    b"content-length: %d\r\n\r\n%b" % (len(_BODY), _BODY)
)
_LINGER_SECONDS = 2.0
"""A client that still sends would lose the answer if the connection closed at once."""


class FewChunks(HttpToolsProtocol):
    """Refuses a request of too many chunks, and closes its connection. A request in one piece costs nothing."""

    _counted: object = None
    _chunks = 0

    def on_chunk_header(self) -> None:
        """Each chunk has one, the empty one at the end too."""
        if self._counted is not self.cycle:
            self._counted, self._chunks = self.cycle, 0
        self._chunks += 1
        if self._chunks == MOST + 2:
            self._refuse()

    def _refuse(self) -> None:
        assert self.cycle is not None
        # To whom it was handed, the client has left.
        self.cycle.disconnected = True
        self.cycle.message_event.set()
        self.flow.resume_reading()
        if not self.cycle.response_started:
            self.transport.write(_REFUSAL)
        self.transport.set_protocol(_Ending(self, self.transport))


class _Ending(asyncio.Protocol):
    """Hears the rest of what a client says, for a while, and nobody listens."""

    def __init__(self, before: asyncio.Protocol, transport: asyncio.Transport) -> None:
        self._before = before
        self._closing = asyncio.get_running_loop().call_later(_LINGER_SECONDS, transport.close)

    def connection_lost(self, error: Exception | None) -> None:
        self._closing.cancel()
        self._before.connection_lost(error)
