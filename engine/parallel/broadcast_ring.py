"""The board that ranks read: one writer, and readers in processes of the same machine.

A message lies once in shared memory that has no name, so nothing of it can be left behind; over its line each reader is
told where. What is short or does not fit, and everything where no memory is shared, goes over the lines themselves.
Knows nothing of what messages mean.
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
    begin: int
    end: int


class BroadcastRing:
    """Belongs to the writer. What `post` wrote stays until `forget` has been called once for it, in the same order;
    the two may be called by two threads."""

    def __init__(self, lines: Sequence[Connection], memory: SharedArena | None = None) -> None:
        self._lines, self._memory = lines, memory
        self._size = 0 if memory is None else len(memory.memory)
        self._posted: deque[RingSpan] = deque()
        self._end = 0

    def publish(self, message: bytes) -> None:
        """Let every reader have `message`. Waits where there is no room for it but in the lines.

        Raises:
            OSError: a reader is gone.
        """
        span = self._room(len(message))
        self._posted.append(span)
        if self._memory is None or span.begin == span.end:
            self.publish_inline(message)
            return
        self._memory.memory[span.begin : span.end] = message
        self._end = span.end
        self._write(_FRAME.pack(_IN_RING, len(message)) + _OFFSET.pack(span.begin))

    def publish_inline(self, message: bytes) -> None:
        """Let every reader have `message`, over its line; it need not be forgotten."""
        self._write(_FRAME.pack(_INLINE, len(message)) + message)

    def _write(self, frame: bytes) -> None:
        # By send_bytes it takes twice as long: more than the system needs, for every line and step.
        for line in self._lines:
            written = os.write(line.fileno(), frame)
            while written < len(frame):
                written += os.write(line.fileno(), frame[written:])

    def release_oldest(self) -> None:
        """All readers have read the oldest of what was posted."""
        self._posted.popleft()

    def _room(self, size: int) -> RingSpan:
        """Where `size` bytes are free, in one piece; an empty span at the end where they are not."""
        end, nowhere = self._end, RingSpan(self._end, self._end)
        if size <= _INLINE_BYTES:
            return nowhere
        held = next((span.begin for span in list(self._posted) if span.begin < span.end), None)
        if held is None:
            return RingSpan(0, size) if size <= self._size else nowhere
        if end > held:  # what is held lies in [held, end)
            if end + size <= self._size:
                return RingSpan(end, end + size)
            return RingSpan(0, size) if size < held else nowhere
        return RingSpan(end, end + size) if end + size < held else nowhere


class RingReader:
    """Belongs to one reader."""

    def __init__(self, line: Connection, memory: SharedArena | None = None) -> None:
        self._line, self._memory = line, memory
        self._unread = b""

    def read(self) -> bytes:
        """The next message. Waits for it.

        Raises:
            EOFError, OSError: the writer is gone.
        """
        where, size = _FRAME.unpack(self._take(_FRAME.size))
        if where == _INLINE:
            return self._take(size)
        assert self._memory is not None
        (begin,) = _OFFSET.unpack(self._take(_OFFSET.size))
        return self._memory.memory[begin : begin + size]

    def _take(self, size: int) -> bytes:
        """The next bytes of the line."""
        if len(self._unread) < size:
            self._unread += self._receive(size - len(self._unread))
        taken, self._unread = self._unread[:size], self._unread[size:]
        return taken

    def _receive(self, missing: int) -> bytes:
        """At least so many bytes; and what else is there already."""
        pieces = []
        while missing > 0:
            pieces.append(os.read(self._line.fileno(), _READ_BYTES))
            if not pieces[-1]:
                raise EOFError
            missing -= len(pieces[-1])
        return b"".join(pieces)
