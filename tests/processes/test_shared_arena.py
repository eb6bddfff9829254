"""Memory of several processes: it grows, has no name, and goes with its holders."""

import os

from charonia.processes.shared_arena import SharedArena


def test_both_sides_see_what_either_writes_and_may_let_it_grow() -> None:
    here = SharedArena(100)
    there = SharedArena(descriptor=os.dup(here.descriptor))
    here.memory[0] = 7
    view = memoryview(there.memory)
    here.require(1 << 20)
    here.memory[(1 << 20) - 1] = 9
    there.follow(1 << 20)
    assert (view[0], there.memory[0], there.memory[(1 << 20) - 1]) == (7, 7, 9)
    here.close()
    there.close()
    assert view[0] == 7


def test_nothing_is_left_of_it() -> None:
    before, shown = set(os.listdir("/proc/self/fd")), set(os.listdir("/dev/shm"))
    arena = SharedArena(100)
    assert set(os.listdir("/dev/shm")) == shown
    arena.close()
    assert set(os.listdir("/proc/self/fd")) == before
