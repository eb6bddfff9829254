"""Deadlines: who is late, said once, and nothing kept of those that ended."""

from charonia.engine.core.deadlines import Deadlines


def test_each_is_late_once_and_not_before_its_time() -> None:
    deadlines = Deadlines()
    for key, deadline in ((1, 5.0), (2, 3.0), (3, 9.0)):
        deadlines.set(key, deadline)
    assert deadlines.pop_expired(2.9) == []
    assert deadlines.pop_expired(5.0) == [2, 1]
    assert deadlines.pop_expired(5.0) == []
    assert len(deadlines.by_key) == 1


def test_who_has_ended_is_never_late() -> None:
    deadlines = Deadlines()
    deadlines.set(1, 5.0)
    deadlines.by_key.pop(1, None)
    deadlines.by_key.pop(7, None)
    assert deadlines.pop_expired(10.0) == []


def test_a_key_that_comes_back_has_its_new_deadline() -> None:
    deadlines = Deadlines()
    deadlines.set(1, 5.0)
    deadlines.by_key.pop(1, None)
    deadlines.set(1, 8.0)
    assert deadlines.pop_expired(6.0) == []
    assert deadlines.pop_expired(8.0) == [1]


def test_nothing_piles_up() -> None:
    deadlines = Deadlines()
    for key in range(1000):
        deadlines.set(key, 1e9)
        deadlines.by_key.pop(key, None)
    assert len(deadlines.by_key) == 0
