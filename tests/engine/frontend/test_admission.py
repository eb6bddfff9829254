"""Limits on what waits: counted, checked, and told apart; with a clock of the test's own."""

import pytest

from charonia.core.errors import InvalidArgument, QueueFull
from charonia.engine.frontend.admission import AdmissionControl, QueueLimits


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_requests_are_limited() -> None:
    admission = AdmissionControl(QueueLimits(requests=2, tokens=100))
    places = []
    for _ in range(2):
        admission.check_capacity(tokens=1)
        places.append(admission.issue_ticket(tokens=1))
    with pytest.raises(QueueFull, match=r"2 requests .*max_queued_requests"):
        admission.check_capacity()
    admission.return_ticket(places[0])
    admission.check_capacity()


def test_what_no_empty_queue_has_room_for_is_refused_for_good() -> None:
    admission = AdmissionControl(QueueLimits(requests=4, tokens=100))
    for prompts, choices, tokens in ((4, 1, 0), (2, 2, 0), (1, 4, 25), (1, 1, 1000)):
        admission.check_size(prompts, choices, tokens)
    for prompts, choices, tokens, field, limit in (
        (5, 1, 0, "prompt", "max_queued_requests"),
        (1, 5, 0, "n", "max_queued_requests"),
        (3, 2, 0, "n", "max_queued_requests"),
        (1, 4, 26, "n", "max_queued_tokens"),
    ):
        with pytest.raises(InvalidArgument, match=limit) as refusal:
            admission.check_size(prompts, choices, tokens)
        assert refusal.value.field == field


def test_prompt_tokens_are_limited() -> None:
    admission = AdmissionControl(QueueLimits(requests=9, tokens=100))
    admission.issue_ticket(tokens=60)
    admission.check_capacity(tokens=40)
    with pytest.raises(QueueFull, match=r"60 prompt tokens .* has 41: more than 100 .*max_queued_tokens"):
        admission.check_capacity(tokens=41)


def test_a_prompt_above_the_limit_may_wait_alone() -> None:
    admission = AdmissionControl(QueueLimits(requests=9, tokens=100))
    admission.check_capacity(tokens=1000)
    admission.issue_ticket(tokens=1000)
    with pytest.raises(QueueFull):
        admission.check_capacity(tokens=1)


def test_a_flood_does_not_keep_the_others_out() -> None:
    admission = AdmissionControl(QueueLimits(requests=8, tokens=100))
    for _ in range(8):
        admission.check_capacity("flood", 10)
        admission.issue_ticket("flood", 10)
    for _ in range(4):
        admission.check_capacity("other", 10)
        admission.issue_ticket("other", 10)
    for tenant in ("flood", "other"):
        with pytest.raises(QueueFull):
            admission.check_capacity(tenant, 10)
    admission.check_capacity("third", 10)


def test_what_left_is_forgotten() -> None:
    admission = AdmissionControl(QueueLimits(requests=8, tokens=100))
    for place in [admission.issue_ticket(tenant, 5) for tenant in "abca"]:
        admission.return_ticket(place)
    assert (admission.requests, admission.tokens, admission._tenants) == (0, 0, {})


def test_come_back_when_everything_has_started_at_the_recent_pace() -> None:
    clock = Clock()
    admission = AdmissionControl(QueueLimits(requests=1000, tokens=1000), clock)
    assert admission.retry_after() == 1
    for _ in range(10):
        admission.record_start()
        clock.now += 0.5
    for _ in range(20):
        admission.issue_ticket()
    assert admission.retry_after() == pytest.approx(10)
    for _ in range(900):
        admission.issue_ticket()
    assert admission.retry_after() == 60
