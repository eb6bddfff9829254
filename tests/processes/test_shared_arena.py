"""Blocks of shared memory: whatever is placed and let go of, every byte is in one block."""

import os
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.processes.shared_arena import SharedArena, SharedArenaView, new_arena_file

SIZE = 4096


@pytest.fixture
def file() -> Iterator[int]:
    made = new_arena_file(SIZE)
    yield made
    os.close(made)


def test_the_other_side_reads_what_was_placed(file: int) -> None:
    arena, view = SharedArena(file), SharedArenaView(file)
    first, second = arena.place(memoryview(b"one")), arena.place(memoryview(b"another"))
    assert first is not None
    assert second is not None
    assert (bytes(view.read(first, 3)), bytes(view.read(second, 7))) == (b"one", b"another")
    assert view.read(first, 3).readonly


def test_what_was_written_is_given_back_while_nobody_reads_it(file: int) -> None:
    arena, view = SharedArena(file), SharedArenaView(file)
    offset = arena.place(memoryview(b"one"))
    assert offset is not None
    arena.trim()
    assert bytes(view.read(offset, 3)) == b"one"
    arena.release(offset)
    assert os.fstat(file).st_blocks > 0
    arena.trim()
    assert os.fstat(file).st_blocks == 0
    assert arena.place(memoryview(b"two")) == offset
    assert bytes(view.read(offset, 3)) == b"two"
    arena.close()
    arena.trim()


def test_what_finds_no_room_is_not_placed(file: int) -> None:
    arena = SharedArena(file)
    assert arena.place(memoryview(bytes(SIZE + 1))) is None
    whole = arena.place(memoryview(bytes(SIZE)))
    assert whole == 0
    assert arena.place(memoryview(b"")) is None
    arena.release(whole)
    assert arena.place(memoryview(b"x")) == 0
    assert len(arena) == 1


@given(st.lists(st.integers(0, 1500) | st.just(-1), max_size=40), st.randoms())
def test_nothing_is_lost_and_nothing_is_twice(steps: list[int], random: object) -> None:
    made = new_arena_file(SIZE)
    try:
        arena, placed = SharedArena(made), dict[int, bytes]()
        view = SharedArenaView(made)
        for number, size in enumerate(steps):
            if size >= 0:
                data = bytes([number % 256]) * size
                offset = arena.place(memoryview(data))
                if offset is not None:
                    placed[offset] = data
            elif placed:
                offset = random.choice(sorted(placed))  # type: ignore[attr-defined]
                arena.release(offset)
                del placed[offset]
            arena.check_integrity()
            assert len(arena) == len(placed)
            assert all(bytes(view.read(offset, len(data))) == data for offset, data in placed.items())
    finally:
        os.close(made)
