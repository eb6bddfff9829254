"""Frames cross whole, however they are cut, and each message by itself."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.http_workers.link import FrameLink


class Pipe:
    """A transport that keeps what is written."""

    def __init__(self) -> None:
        self.written = bytearray()
        self.closing = False

    def write(self, data: bytes | bytearray) -> None:
        self.written += data

    def is_closing(self) -> bool:
        return self.closing

    def close(self) -> None:
        self.closing = True


class End:
    """One end of a link over a pipe."""

    def __init__(self) -> None:
        self.received: list[Any] = []
        self.unsendable: list[Any] = []
        self.lost = False
        decode = msgspec.msgpack.Decoder(list[Any]).decode
        self.link: FrameLink[Any, Any] = FrameLink(decode, self.received.append, self._on_lost, self._on_unsendable)
        self.pipe = Pipe()

    def _on_lost(self) -> None:
        self.lost = True

    def _on_unsendable(self, message: Any, error: Exception) -> None:
        self.unsendable.append(message)


@contextmanager
def in_loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    try:
        asyncio.set_event_loop(loop)
        yield loop
    finally:
        asyncio.set_event_loop(None)
        loop.close()


def end_in(loop: asyncio.AbstractEventLoop) -> End:
    async def make() -> End:
        return End()

    return loop.run_until_complete(make())


def turn(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_until_complete(asyncio.sleep(0))


messages = st.lists(st.lists(st.binary(max_size=40) | st.integers(-9, 9), max_size=4), max_size=6)


@given(messages, st.data())
def test_frames_cross_whole_however_they_are_cut(turns: list[list[Any]], data: st.DataObject) -> None:
    with in_loop() as loop:
        here, there = end_in(loop), end_in(loop)
        here.link.connection_made(here.pipe)  # type: ignore[arg-type]
        for sent in turns:
            for message in sent:
                here.link.send(message)
            turn(loop)
        left = bytes(here.pipe.written)
        while left:
            size = data.draw(st.integers(1, len(left)))
            there.link.data_received(left[:size])
            left = left[size:]
        assert there.received == [message for sent in turns for message in sent]


def test_what_is_sent_in_one_turn_is_one_frame() -> None:
    with in_loop() as loop:
        here = end_in(loop)
        here.link.connection_made(here.pipe)  # type: ignore[arg-type]
        for number in range(3):
            here.link.send(number)
        assert not here.pipe.written
        turn(loop)
        assert msgspec.msgpack.decode(bytes(here.pipe.written)[8:]) == [0, 1, 2]


def test_messages_wait_for_the_connection() -> None:
    with in_loop() as loop:
        here = end_in(loop)
        here.link.send("early")
        turn(loop)
        here.link.connection_made(here.pipe)  # type: ignore[arg-type]
        turn(loop)
        assert b"early" in here.pipe.written


def test_one_that_cannot_be_encoded_does_not_hold_up_the_others() -> None:
    with in_loop() as loop:
        here = end_in(loop)
        here.link.connection_made(here.pipe)  # type: ignore[arg-type]
        for message in ("one", "\ud800", "two"):
            here.link.send(message)
        turn(loop)
        turn(loop)
        assert msgspec.msgpack.decode(bytes(here.pipe.written)[8:]) == ["one", "two"]
        assert here.unsendable == ["\ud800"]


def test_answers_leave_in_the_turn_that_brought_the_question() -> None:
    with in_loop() as loop:
        here, there = end_in(loop), end_in(loop)
        for end in (here, there):
            end.link.connection_made(end.pipe)  # type: ignore[arg-type]
        there.link._receive = there.link.send
        here.link.send("question")
        turn(loop)
        there.link.data_received(bytes(here.pipe.written))
        assert b"question" in there.pipe.written


def test_calls_that_follow_each_other_fast_leave_together(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("charonia.http_workers.link.time.monotonic", lambda: now)
    with in_loop() as loop:
        here, there = end_in(loop), end_in(loop)
        here.link.connection_made(here.pipe)  # type: ignore[arg-type]

        def frames() -> list[Any]:
            """The frames that have left since the last call."""
            written = bytes(here.pipe.written)
            here.pipe.written.clear()
            there.received.clear()
            if written:
                there.link.data_received(written)
            return there.received[:]

        here.link.gather("alone")
        turn(loop)
        assert frames() == ["alone"]
        now += 0.001
        for number in range(3):
            here.link.gather(number)
            turn(loop)
            assert not frames()
        for _ in range(20):
            turn(loop)
        assert frames() == [0, 1, 2]
        here.link.gather("soon")
        here.link.send("now")
        turn(loop)
        assert frames() == ["soon", "now"]
        for number in range(100):
            here.link.gather(number)
        turn(loop)
        assert len(frames()) == 100, "there are enough"


def test_the_other_end_is_gone() -> None:
    with in_loop() as loop:
        here = end_in(loop)
        here.link.connection_made(here.pipe)  # type: ignore[arg-type]
        here.link.connection_lost(None)
        assert here.lost
        here.link.send("nothing hears it")
        turn(loop)
        assert not here.pipe.written


def test_a_message_that_cannot_be_taken_is_told_and_the_next_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    with in_loop() as loop:
        here, there = end_in(loop), end_in(loop)
        here.link.connection_made(here.pipe)  # type: ignore[arg-type]
        taken: list[Any] = []

        def receive(message: Any) -> None:
            if message == "bad":
                raise ValueError(message)
            taken.append(message)

        there.link._receive = receive
        for message in ("bad", "good"):
            here.link.send(message)
        turn(loop)
        there.link.data_received(bytes(here.pipe.written))
        assert taken == ["good"]
        assert "could not be taken" in caplog.text
