"""Limits on what waits: counted, checked, and told apart; with a clock of the test's own."""

import pytest

from charonia.core.errors import QueueFull
from charonia.engine.admission import Admission, QueueLimits


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_are_limited() -> None:
    admission = Admission(QueueLimits(requests=2, tokens=100))
    for _ in range(2):
        admission.check(1)
        admission.enter(1)
    with pytest.raises(QueueFull, match=r"2 requests .*max_queued_requests"):
        admission.check()
    admission.leave(1)
    admission.check()


def test_prompt_tokens_are_limited() -> None:
    admission = Admission(QueueLimits(requests=9, tokens=100))
    admission.enter(60)
    admission.check(40)
    with pytest.raises(QueueFull, match=r"60 prompt tokens .* has 41: more than 100 .*max_queued_tokens"):
        admission.check(41)


def test_a_prompt_above_the_limit_may_wait_alone() -> None:
    admission = Admission(QueueLimits(requests=9, tokens=100))
    admission.check(1000)
    admission.enter(1000)
    with pytest.raises(QueueFull):
        admission.check(1)


def test_come_back_when_everything_has_started_at_the_recent_pace() -> None:
    clock = Clock()
    admission = Admission(QueueLimits(requests=1000, tokens=1000), clock)
    assert admission.retry_after() == 1
    for _ in range(10):
        admission.note_start()
        clock.now += 0.5
    for _ in range(20):
        admission.enter(1)
    assert admission.retry_after() == pytest.approx(10)
    for _ in range(900):
        admission.enter(1)
    assert admission.retry_after() == 60
