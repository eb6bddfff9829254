"""A bound on the pieces of a chunked request, and on its trailers: v2's section 3.6, below HTTP's doors.

Knows the chunks that a client made, which an ASGI application does not see any more.
"""

from http import HTTPStatus

from .protocol_errors import MAX_HEAD_BYTES, ErrorAnsweringProtocol, HttpProtocolError, head_too_large

MAX_CHUNKS = 65536
_TEXT = f"Chunked request body exceeds maximum of {MAX_CHUNKS} non-empty chunks. Send fewer or larger HTTP chunks."


class ChunkLimitProtocol(ErrorAnsweringProtocol):
    """Refuses a request of too many chunks, and closes its connection. A request in one piece costs nothing."""

    _counted: object = None
    _chunks = 0
    _trailing = 0

    def on_chunk_header(self) -> None:
        """Each chunk has one, the empty one at the end too."""
        if self._counted is not self.cycle:
            self._counted, self._chunks = self.cycle, 0
        self._trailing = 0
        self._chunks += 1
        if self._chunks == MAX_CHUNKS + 2:
            self.answer_error(HttpProtocolError(HTTPStatus.BAD_REQUEST, _TEXT, goes_on=True))

    def count_trailing(self, size: int) -> None:
        """So many bytes came and none of them was the body's: extensions of a chunk, or trailers."""
        self._trailing += size
        if self._trailing > MAX_HEAD_BYTES:
            self.answer_error(head_too_large())
