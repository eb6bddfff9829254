"""Large tensors lie in shared memory for as long as anybody has them."""

import gc
import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest

from charonia.core.tensor import Tensor
from charonia.http_workers.tensors import PLACED_BYTES, SentTensor, TensorExchange
from charonia.processes.shared_arena import new_arena_file

SIZE = 4 * PLACED_BYTES


class Ends:
    """Both ends of a link's shared memory."""

    def __init__(self, files: tuple[int, int]) -> None:
        self.unread = 0
        self.here = TensorExchange(*files, self.count)
        self.there = TensorExchange(*reversed(files), self.count)

    def count(self) -> None:
        self.unread += 1

    def give_back(self) -> None:
        self.here.on_released(self.there.released())
        self.here.arena.check_integrity()


@pytest.fixture
def ends() -> Iterator[Ends]:
    files = new_arena_file(SIZE), new_arena_file(SIZE)
    yield Ends(files)
    for file in files:
        os.close(file)


def large(value: float = 1.0) -> Tensor:
    return Tensor.from_values("x", "FP32", np.full((2, PLACED_BYTES // 8), value))


def test_a_large_one_is_placed_and_stays_while_a_view_of_it_does(ends: Ends) -> None:
    message = ends.here.message(large(3.0))
    assert (message.data, message.place) == (None, (0, PLACED_BYTES))
    tensor = ends.there.tensor(message)
    kept = tensor.data.reshape(2, -1)[:, 1:3]
    assert kept.tolist() == [[3.0, 3.0]] * 2
    assert not kept.flags.writeable
    del tensor
    gc.collect()
    ends.give_back()
    assert len(ends.here.arena) == 1
    del kept
    gc.collect()
    assert ends.unread == 1
    ends.give_back()
    assert len(ends.here.arena) == 0


def test_a_thread_may_be_the_last_to_have_it(ends: Ends) -> None:
    held = [ends.there.tensor(ends.here.message(large()))]
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    ends.give_back()
    assert len(ends.here.arena) == 0


def test_small_ones_strings_and_those_without_room_go_inline(ends: Ends) -> None:
    small = ends.here.message(Tensor.from_values("x", "FP32", [1.0]))
    strings = ends.here.message(Tensor.from_values("x", "BYTES", [b"a" * PLACED_BYTES]))
    assert (small.place, strings.place) == (None, None)
    held = [ends.here.message(large()) for _ in range(5)]
    assert [each.place is None for each in held] == [False] * 4 + [True]
    ends.here.take_back(held)
    ends.there.discard([SentTensor("x", "FP32", (1,), None, [], (0, 4))])
    assert ends.there.released() == [0]
    ends.here.arena.check_integrity()
    assert len(ends.here.arena) == 0
