"""The sounds that one model writes down at a time: how much memory they hold, and which of their windows the decoder
begins together."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from ...core.errors import QueueFull
from ...core.media import MediaSource

_MOST_SOUNDS = 128
_MOST_BYTES = 2 << 30
"""What the sounds of one model that are not written down yet may hold together; one alone may hold more."""
_RETRY_AFTER = 1.0
_TOGETHER = 8
"""Encoded windows that wait for no more of them."""
_LONGEST_WAIT = 20.0
"""Seconds that one waits for others."""


class SoundsInProgress:
    """How much memory the sounds of one model hold: their files, and the features that are not encoded yet."""

    def __init__(self) -> None:
        self._count = self._bytes = 0

    @contextmanager
    def admit(self, source: MediaSource) -> Iterator["HeldSound"]:
        """The block in which a sound is in progress. Raises `QueueFull` where there are too many of them, or too
        large ones."""
        if self._count >= _MOST_SOUNDS:
            raise QueueFull(f"{self._count} sounds are in progress already", retry_after=_RETRY_AFTER)
        held = HeldSound(self)
        self._count += 1
        try:
            held.add(len(source.data) + len(source.url))
            yield held
        finally:
            held.release(held.bytes)
            self._count -= 1

    def reserve(self, size: int, held: int) -> None:
        """Count more bytes of a sound that holds some. Raises as `admit`."""
        others = self._bytes - held
        if others and self._bytes + size > _MOST_BYTES:
            message = f"{self._count - 1} sounds in progress hold {others >> 20:,} MiB already"
            raise QueueFull(message, retry_after=_RETRY_AFTER)
        self._bytes += size

    def release(self, size: int) -> None:
        self._bytes -= size


class HeldSound:
    """What one of the sounds in progress holds."""

    def __init__(self, sounds: SoundsInProgress) -> None:
        self._sounds = sounds
        self.bytes = 0

    def add(self, size: int) -> None:
        self._sounds.reserve(size, self.bytes)
        self.bytes += size

    def release(self, size: int) -> None:
        self._sounds.release(size)
        self.bytes -= size


class WindowsTogether:
    """Lets an encoded window wait for those of no longer sounds that are being encoded by then, and for none that comes
    later: a decoder makes eight transcripts in hardly more steps than one, and each step that runs beside an encoder on
    the same cores only keeps it from the next window."""

    def __init__(self) -> None:
        self._encoding: dict[object, int] = {}
        """The windows of its sound, by each window that is being encoded."""
        self._waiting: dict[asyncio.Event, set[object]] = {}
        """What each still waits for."""

    @contextmanager
    def encode(self, windows: int) -> Iterator[None]:
        """The block in which a window is being encoded, of a sound with so many."""
        window = object()
        self._encoding[window] = windows
        try:
            yield
        finally:
            del self._encoding[window]
            for awaited in self._waiting.values():
                awaited.discard(window)
            if not all(self._waiting.values()):
                self._begin_all()

    async def gather(self, windows: int) -> None:
        """Return when an encoded window of a sound with so many may be heard: once what one of those that wait waits
        for is encoded, enough of them wait, or one has waited long enough."""
        begin = asyncio.Event()
        self._waiting[begin] = {window for window, others in self._encoding.items() if others <= windows}
        if not self._waiting[begin] or len(self._waiting) == _TOGETHER:
            self._begin_all()
        try:
            await asyncio.wait_for(begin.wait(), _LONGEST_WAIT)
        except TimeoutError:
            self._begin_all()
        finally:
            self._waiting.pop(begin, None)

    def _begin_all(self) -> None:
        for begin in self._waiting:
            begin.set()
        self._waiting.clear()
