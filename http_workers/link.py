"""The link between a worker and the hub: lists of messages over a socket that the child inherits.

All that is sent in one turn of the event loop leaves as one frame: a list in msgpack behind its length. Either side
learns at once when the other ends.
"""

import asyncio
import logging
import struct
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Generic, TypeVar, cast

import msgspec

from .messages import encode_part

log = logging.getLogger(__name__)

_LENGTH = struct.Struct("<Q")

_BRISK_SECONDS = 0.002
"""Calls that follow each other as fast as this are gathered: the next is near."""

_GATHER_TURNS, _MOST_GATHERED = 16, 64
"""Turns of the loop for which they wait for more, at most, and how many leave at once."""

T_out = TypeVar("T_out")
T_in = TypeVar("T_in")


class FrameLink(asyncio.Protocol, Generic[T_out, T_in]):
    """One end of a link; `send` and `gather` never wait.

    `decode` turns a frame into messages, each of which `receive` gets. `on_lost` is called when the other end is gone.
    `on_unsendable` gets a message that cannot be encoded; the others of its frame leave.
    """

    def __init__(
        self,
        decode: Callable[[Any], list[T_in]],
        receive: Callable[[T_in], None],
        on_lost: Callable[[], None],
        on_unsendable: Callable[[T_out, Exception], None],
    ) -> None:
        self._decode, self._receive = decode, receive
        self._on_lost, self._on_unsendable = on_lost, on_unsendable
        self.on_drained: Callable[[], None] = lambda: None
        """Called when the other end reads again."""
        self.before_flush: Callable[[], None] = lambda: None
        """Called before messages leave; it may send more."""
        self.congested = False
        """Whether the other end does not read: what need not leave now should not."""
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._encoder = msgspec.msgpack.Encoder(enc_hook=encode_part)
        self._transport: asyncio.Transport | None = None
        self._waiting: list[T_out] = []
        self._scheduled = self._gathering = self._receiving = self._lost = False
        self._gathered_at = 0.0
        self._rest = b""
        self._frame: bytearray | None = None
        self._filled = 0

    def send(self, message: T_out) -> None:
        """Send it at the end of this turn of the loop; it is dropped when the other end is gone."""
        self._waiting.append(message)
        if not self._scheduled:
            self.schedule()

    def gather(self, message: T_out) -> None:
        """Send it when the loop has turned a few times, if such messages follow each other fast, else as `send` does: a
        frame costs both ends, and whoever it wakes, more than several messages in it."""
        self._waiting.append(message)
        now = time.monotonic()
        is_brisk, self._gathered_at = now - self._gathered_at < _BRISK_SECONDS, now
        if self._scheduled or self._gathering:
            return
        if is_brisk:
            self._gathering = True
            self._loop.call_soon(self._flush_gathered, _GATHER_TURNS)
        else:
            self.schedule()

    def _flush_gathered(self, turns: int) -> None:
        if self._gathering and turns and len(self._waiting) < _MOST_GATHERED:
            self._loop.call_soon(self._flush_gathered, turns - 1)
        elif self._gathering:
            self._scheduled = True
            self.flush()

    def schedule(self) -> None:
        """Flush at the end of this turn of the loop, after a call of `before_flush`, which may send more."""
        if not self._scheduled:
            self._scheduled = True
            if not self._receiving:  # else at the end of that: a turn of the loop costs more than most answers
                self._loop.call_soon(self.flush)

    def schedule_from_any_thread(self) -> None:
        """Do as `schedule`, from any thread; it has no effect once the loop has ended."""
        if threading.get_ident() == self._thread:
            self.schedule()
            return
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.schedule)

    def flush(self) -> None:
        """Send now what waits."""
        self.before_flush()
        self._scheduled = self._gathering = False
        transport = self._transport
        if transport is None and not self._lost:
            return  # it is not connected yet
        messages, self._waiting = self._waiting, []
        if not messages or transport is None or transport.is_closing():
            return
        frame = bytearray(_LENGTH.size)
        try:
            self._encoder.encode_into(messages, frame, _LENGTH.size)
        except Exception:  # of one of them: text with half a surrogate, a number that is too large
            frame = bytearray(_LENGTH.size)
            self._encoder.encode_into([message for message in messages if self._encodes(message)], frame, _LENGTH.size)
        _LENGTH.pack_into(frame, 0, len(frame) - _LENGTH.size)
        transport.write(frame)

    def _encodes(self, message: T_out) -> bool:
        try:
            self._encoder.encode(message)
        except Exception as error:
            self._loop.call_soon(self._on_unsendable, message, error)
            return False
        return True

    def close(self) -> None:
        """Send what waits, and hang up."""
        if self._transport is not None:
            self.flush()
            self._transport.close()

    def abort(self) -> None:
        """Hang up at once: the other end does not read."""
        if self._transport is not None:
            self._transport.abort()

    # Called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if self._waiting:
            self.schedule()

    def connection_lost(self, error: Exception | None) -> None:
        self._transport, self._lost = None, True
        self._on_lost()

    def pause_writing(self) -> None:
        self.congested = True

    def resume_writing(self) -> None:
        self.congested = False
        self.on_drained()

    def data_received(self, data: bytes) -> None:
        self._receiving = True
        try:
            self._take_frames(data)
        finally:
            self._receiving = False
        if self._scheduled:
            self.flush()

    def _take_frames(self, data: bytes) -> None:
        if self._frame is not None:
            data = self._fill(self._frame, data)
            if not data:
                return
        if self._rest:
            data, self._rest = self._rest + data, b""
        at = 0
        view = memoryview(data)
        while len(data) - at >= _LENGTH.size:
            begin = at + _LENGTH.size
            (length,) = _LENGTH.unpack_from(data, at)
            if len(data) - begin < length:
                # A long frame: its bytes are collected in memory of their own, which its tensors then lie in.
                self._frame, self._filled = bytearray(length), len(data) - begin
                self._frame[: self._filled] = view[begin:]
                return
            at = begin + length
            self._take(view[begin:at])
        self._rest = data[at:]

    def _fill(self, frame: bytearray, data: bytes) -> bytes:
        """Add to the frame that has begun; what is left of `data` behind it."""
        missing = len(frame) - self._filled
        part = data[:missing]
        frame[self._filled : self._filled + len(part)] = part
        self._filled += len(part)
        if self._filled < len(frame):
            return b""
        self._frame = None
        self._take(frame)
        return data[missing:]

    def _take(self, frame: Any) -> None:
        messages: Sequence[T_in] = self._decode(frame)
        for message in messages:
            try:
                self._receive(message)
            except Exception:
                log.exception("a message of another process could not be taken: %s", type(message).__name__)
