"""A ring of shared memory through which one writer broadcasts messages to processes of the same machine.

A message lies in the ring once, and each reader is told over its connection where. A short one, one that finds no room,
and everything where no memory is shared, goes over the connections themselves. Knows nothing of the messages' meaning.
"""

import os
from collections import deque
from collections.abc import Sequence
from multiprocessing.connection import Connection
from struct import Struct
from typing import NamedTuple

from ...processes.shared_arena import SharedArena

RING_BYTES = 1 << 20
"""Bytes of shared memory: some hundred long prompts, or tens of thousands of steps."""

_INLINE_BYTES = 512
"""Bytes that are copied to each reader sooner than looked up by it."""

_INLINE, _IN_RING = b"\0", b"\1"
_FRAME = Struct("<cI")  # where the message is, and its bytes: they follow, or their offset does
_OFFSET = Struct("<I")
_READ_BYTES = 1 << 16


class RingSpan(NamedTuple):
    """Bytes of the ring; empty for a message that went over the connections."""

    begin: int
    end: int


class BroadcastRing:
    """The writer's end. A published message stays in the ring until `release_oldest` was called for it; publishing and
    releasing may be done by two threads."""

    def __init__(self, connections: Sequence[Connection], arena: SharedArena | None = None) -> None:
        self._connections, self._arena = connections, arena
        self._size = 0 if arena is None else len(arena.memory)
        self._published: deque[RingSpan] = deque()
        self._end = 0

    def publish(self, message: bytes) -> None:
        """Send `message` to every reader. Waits for readers where the ring has no room for it.

        Raises:
            OSError: a reader is gone.
        """
        span = self._free_span(len(message))
        self._published.append(span)
        if self._arena is None or span.begin == span.end:
            self.publish_inline(message)
            return
        self._arena.memory[span.begin : span.end] = message
        self._end = span.end
        self._write(_FRAME.pack(_IN_RING, len(message)) + _OFFSET.pack(span.begin))

    def publish_inline(self, message: bytes) -> None:
        """Send `message` to every reader over its connection; it need not be released."""
        self._write(_FRAME.pack(_INLINE, len(message)) + message)

    def release_oldest(self) -> None:
        """All readers have read the oldest published message."""
        self._published.popleft()

    def _write(self, frame: bytes) -> None:
        # By send_bytes it takes twice as long: more than the system needs, for every connection and step.
        for connection in self._connections:
            written = os.write(connection.fileno(), frame)
            while written < len(frame):
                written += os.write(connection.fileno(), frame[written:])

    def _free_span(self, size: int) -> RingSpan:
        """`size` free bytes in one piece; an empty span where there are none."""
        end, nowhere = self._end, RingSpan(self._end, self._end)
        if size <= _INLINE_BYTES:
            return nowhere
        held = next((span.begin for span in list(self._published) if span.begin < span.end), None)
        if held is None:
            return RingSpan(0, size) if size <= self._size else nowhere
        if end > held:  # the bytes that are held lie in [held, end)
            if end + size <= self._size:
                return RingSpan(end, end + size)
            return RingSpan(0, size) if size < held else nowhere
        return RingSpan(end, end + size) if end + size < held else nowhere


class RingReader:
    """One reader's end."""

    def __init__(self, connection: Connection, arena: SharedArena | None = None) -> None:
        self._connection, self._arena = connection, arena
        self._unread = b""

    def read(self) -> bytes:
        """Wait for the next message.

        Raises:
            EOFError, OSError: the writer is gone.
        """
        where, size = _FRAME.unpack(self._take(_FRAME.size))
        if where == _INLINE:
            return self._take(size)
        assert self._arena is not None
        (begin,) = _OFFSET.unpack(self._take(_OFFSET.size))
        return self._arena.memory[begin : begin + size]

    def _take(self, size: int) -> bytes:
        """The next bytes of the connection; all that are there already are read with them."""
        while len(self._unread) < size:
            piece = os.read(self._connection.fileno(), _READ_BYTES)
            if not piece:
                raise EOFError
            self._unread += piece
        taken, self._unread = self._unread[:size], self._unread[size:]
        return taken
