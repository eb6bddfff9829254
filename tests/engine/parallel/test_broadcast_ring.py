"""What is posted is read, whatever its size, by every reader, and nothing of it is overwritten too soon."""

import multiprocessing
import os
from collections import deque
from collections.abc import Iterator
from contextlib import ExitStack, closing
from multiprocessing.connection import Connection
from threading import Thread

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.engine.parallel.broadcast_ring import BroadcastRing, RingReader
from charonia.processes.shared_arena import SharedArena

SIZE = 4096


class Readers:
    """Two desks beside the board, in this process."""

    def __init__(self, memory: SharedArena | None) -> None:
        pairs = [multiprocessing.Pipe() for _ in range(2)]
        self.ours: list[Connection] = [ours for ours, _ in pairs]
        self.theirs: list[Connection] = [theirs for _, theirs in pairs]
        self.board = BroadcastRing(self.ours, memory)
        self.desks = [RingReader(line, memory) for line in self.theirs]

    def close(self) -> None:
        for line in (*self.ours, *self.theirs):
            line.close()


@pytest.fixture(params=[True, False], ids=["memory", "lines alone"])
def readers(request: pytest.FixtureRequest) -> Iterator[Readers]:
    with ExitStack() as stack:
        memory = stack.enter_context(closing(SharedArena(SIZE))) if request.param else None
        yield stack.enter_context(closing(Readers(memory)))


@pytest.mark.parametrize("size", [0, 1, 600, SIZE, SIZE + 1])
def test_every_reader_reads_what_is_posted(readers: Readers, size: int) -> None:
    message = os.urandom(size)
    readers.board.publish(message)
    assert [desk.read() for desk in readers.desks] == [message] * 2


def test_a_message_larger_than_all_buffers_waits_for_its_readers(readers: Readers) -> None:
    message = os.urandom(3 << 20)
    posting = Thread(target=readers.board.publish, args=(message,))
    posting.start()
    assert [desk.read() for desk in readers.desks] == [message] * 2
    posting.join()


def test_commands_and_plans_stay_in_order(readers: Readers) -> None:
    readers.board.publish(b"1" * 900)
    readers.board.publish_inline(b"2")
    readers.board.publish(b"3" * 900)
    for desk in readers.desks:
        assert [desk.read()[:1] for _ in range(3)] == [b"1", b"2", b"3"]


@given(st.lists(st.tuples(st.integers(0, SIZE + 100), st.integers(1, 4)), max_size=60))
def test_nothing_is_overwritten_before_it_is_forgotten(steps: list[tuple[int, int]]) -> None:
    """Sizes, and how many may be on their way: readers read late, and then find what was meant for them."""
    with closing(SharedArena(SIZE)) as memory, closing(Readers(memory)) as readers:
        posted: deque[bytes] = deque()
        for number, (size, most) in enumerate(steps):
            message = bytes([number % 256]) * size
            readers.board.publish(message)
            posted.append(message)
            while len(posted) >= most:
                due = posted.popleft()
                assert [desk.read() for desk in readers.desks] == [due] * 2
                readers.board.release_oldest()


def test_a_reader_that_is_gone_is_an_error(readers: Readers) -> None:
    readers.theirs[1].close()
    with pytest.raises(OSError, match=r"Broken pipe|reset"):
        readers.board.publish(b"x" * 600)


def test_a_writer_that_is_gone_is_the_end(readers: Readers) -> None:
    for line in readers.ours:
        line.close()
    with pytest.raises((EOFError, ConnectionError)):
        readers.desks[0].read()


def test_memory_has_no_name_and_goes_with_its_holders() -> None:
    before = set(os.listdir("/proc/self/fd"))
    shown = set(os.listdir("/dev/shm"))
    with closing(SharedArena(SIZE)):
        assert set(os.listdir("/dev/shm")) == shown
    assert set(os.listdir("/proc/self/fd")) == before
