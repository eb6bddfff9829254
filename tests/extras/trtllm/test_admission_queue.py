"""Who goes next, and how many at once. Time stands still unless a test moves it."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.extras.trtllm.client import AdmissionQueue
from charonia.scheduler.sequence import Sequence, SequenceSpec


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def add(key: int, **asked: Any) -> SequenceSpec:
    return SequenceSpec(key=key, prompt=np.ones(1, np.int32), max_tokens=4, **asked)


def drain(line: AdmissionQueue) -> list[int]:
    """Keys in the order in which they go, one at a time."""
    keys = []
    while (sequence := line.pop_next()) is not None:
        keys.append(sequence.spec.key)
        line.release(sequence)
        line.check_integrity()
    return keys


def test_no_more_than_there_are_places() -> None:
    line = AdmissionQueue(2, Clock())
    for key in range(4):
        line.enqueue(add(key))
    first, second = line.pop_next(), line.pop_next()
    assert first is not None
    assert second is not None
    assert (first.spec.key, second.spec.key, line.pop_next(), line.running, len(line)) == (0, 1, None, 2, 2)
    line.release(first)
    assert (third := line.pop_next()) is not None
    assert (third.spec.key, line.running, len(line)) == (2, 2, 1)


def test_classes_come_first_and_waiting_helps() -> None:
    clock = Clock()
    line = AdmissionQueue(1, clock)
    line.enqueue(add(1, priority=2))
    line.enqueue(add(2, priority=0))
    line.enqueue(add(3, priority=1))
    assert drain(line) == [2, 3, 1]
    line.enqueue(add(1, priority=1))
    clock.now = 6.0
    line.enqueue(add(2, priority=0))
    assert drain(line) == [1, 2]


def test_tenants_take_turns_by_what_they_were_served() -> None:
    line = AdmissionQueue(1, Clock())
    for key in range(3):
        line.enqueue(add(key, tenant="flood"))
    line.enqueue(add(10, tenant="other"))
    first = line.pop_next()
    assert first is not None
    line.charge(first, 10_000, 10_000)
    line.release(first)
    assert drain(line) == [10, 1, 2]


@given(steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.sampled_from("abc")), max_size=60))
def test_nobody_is_lost(steps: list[tuple[int, int, str]]) -> None:
    line, inside, running = AdmissionQueue(3, Clock()), dict[int, Sequence](), dict[int, Sequence]()
    for key, (verb, priority, tenant) in enumerate(steps):
        if verb == 0:
            inside[key] = line.enqueue(add(key, priority=priority, tenant=tenant))
        elif verb == 1:
            could = len(running) < 3 and len(inside) > 0
            sequence = line.pop_next()
            assert (sequence is not None) == could
            if sequence is not None:
                running[sequence.spec.key] = inside.pop(sequence.spec.key)
        elif verb == 2 and (inside or running):
            group = running if running and priority % 2 else inside or running
            line.release(group.pop(next(iter(group))))
        line.check_integrity()
        assert (len(line), line.running) == (len(inside), len(running))
    for sequence in running.values():
        line.release(sequence)
    assert sorted(drain(line)) == sorted(inside)


def test_integrity_is_checked() -> None:
    line = AdmissionQueue(1, Clock())
    line.running = 2
    with pytest.raises(AssertionError):
        line.check_integrity()
