"""Limits on the requests that wait: counted, checked, and told apart; with a clock of the test's own."""

import asyncio

import pytest

from charonia.core.errors import InvalidArgument, QueueFull
from charonia.engine.client.admission import (
    AdmissionControl,
    BackgroundLimit,
    QueueLimits,
    QueueTicket,
    most_in_background,
)


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def enter(admission: AdmissionControl, tenant: str = "", tokens: int = 0) -> QueueTicket:
    ticket = admission.admit(tenant)
    admission.add_prompt(ticket, tokens)
    return ticket


def test_requests_are_limited() -> None:
    admission = AdmissionControl(QueueLimits(requests=2, tokens=100))
    tickets = [enter(admission, tokens=1) for _ in range(2)]
    with pytest.raises(QueueFull, match=r"2 requests .*max_queued_requests"):
        admission.admit()
    tickets[0].release()
    tickets[0].release()
    assert (admission.waiting.requests, admission.waiting.tokens) == (1, 1)
    admission.admit()


def test_what_no_empty_queue_has_room_for_is_refused_for_good() -> None:
    admission = AdmissionControl(QueueLimits(requests=4, tokens=100))

    def ask(prompts: int, choices: int, tokens: int) -> None:
        admission.check_count(prompts, choices)
        with admission.admit("", choices) as ticket:
            admission.add_prompt(ticket, tokens)

    for prompts, choices, tokens in ((4, 1, 0), (2, 2, 0), (1, 4, 25), (1, 1, 1000)):
        ask(prompts, choices, tokens)
    for prompts, choices, tokens, field, limit in (
        (5, 1, 0, "prompt", "max_queued_requests"),
        (1, 5, 0, "n", "max_queued_requests"),
        (3, 2, 0, "n", "max_queued_requests"),
        (1, 4, 26, "n", "max_queued_tokens"),
    ):
        with pytest.raises(InvalidArgument, match=limit) as refusal:
            ask(prompts, choices, tokens)
        assert refusal.value.field == field
    assert (admission.waiting.requests, admission.waiting.tokens) == (0, 0)


def test_prompt_tokens_are_limited() -> None:
    admission = AdmissionControl(QueueLimits(requests=9, tokens=100))
    enter(admission, tokens=60)
    enter(admission, tokens=40).release()
    with pytest.raises(QueueFull, match=r"60 prompt tokens .* has 41: more than 100 .*max_queued_tokens"):
        enter(admission, tokens=41)


def test_a_prompt_above_the_limit_may_wait_alone() -> None:
    admission = AdmissionControl(QueueLimits(requests=9, tokens=100))
    enter(admission, tokens=1000)
    with pytest.raises(QueueFull):
        enter(admission, tokens=1)


def test_a_flood_does_not_keep_the_others_out() -> None:
    admission = AdmissionControl(QueueLimits(requests=8, tokens=100))
    for _ in range(8):
        enter(admission, "flood", 10)
    for _ in range(4):
        enter(admission, "other", 10)
    for tenant in ("flood", "other"):
        with pytest.raises(QueueFull):
            admission.admit(tenant)
    enter(admission, "third", 10)


def test_tickets_that_are_released_are_forgotten() -> None:
    admission = AdmissionControl(QueueLimits(requests=8, tokens=100))
    for ticket in [enter(admission, tenant, 5) for tenant in "abca"]:
        ticket.release()
    assert (admission.waiting.requests, admission.waiting.tokens, admission._tenants) == (0, 0, {})


def test_come_back_when_everything_has_started_at_the_recent_pace() -> None:
    clock = Clock()
    admission = AdmissionControl(QueueLimits(requests=1000, tokens=1000), clock)
    assert admission.retry_after() == 1
    for _ in range(10):
        admission.admit().release(started=True)
        clock.now += 0.5
    for _ in range(20):
        admission.admit()
    assert admission.retry_after() == pytest.approx(10)
    for _ in range(900):
        admission.admit()
    assert admission.retry_after() == 60


@pytest.mark.parametrize(("rows", "requests", "most"), [(64, 512, 48), (64, 10, 5), (1, 512, 1), (1, 1, 1)])
def test_background_work_leaves_rows_and_places_in_the_queue(rows: int, requests: int, most: int) -> None:
    assert most_in_background(rows, QueueLimits(requests, 1000)) == most


def test_background_work_is_limited_by_requests() -> None:
    limit, cache = BackgroundLimit(2), (0, 100)
    with limit.admit("a", True, (100, 100)):  # alone, whatever the cache holds
        with pytest.raises(QueueFull), limit.admit("a", True, (76, 100)):
            pass
        with limit.admit("a", True, cache):
            with pytest.raises(QueueFull), limit.admit("b", True, cache):
                pass
            with limit.admit("a", False, cache) as ticket:  # another answer of a request that was taken
                ticket.admission.add_prompt(ticket, 10**9)
                ticket.release(started=True)
                assert limit.count == 3
    assert limit.count == 0


async def test_who_waits_for_room_is_admitted_in_turn() -> None:
    """Those with a place wait for tokens while others wait for a place, and whoever leaves is in nobody's way."""
    admission, admitted = AdmissionControl(QueueLimits(requests=2, tokens=10)), list[int]()

    async def ask(number: int) -> QueueTicket:
        ticket = await admission.take_turn("requests", admission.admit)
        try:
            await admission.take_turn("tokens", lambda: admission.add_prompt(ticket, 8))
        except asyncio.CancelledError:
            ticket.release()
            raise
        admitted.append(number)
        return ticket

    tasks = [asyncio.create_task(ask(number)) for number in range(5)]
    for _ in range(3):
        await asyncio.sleep(0)
    assert (admitted, admission.waiting.requests, admission.waiting.tokens) == ([0], 2, 8)
    for leaving in (1, 3):
        tasks[leaving].cancel()
    for number in (0, 2, 4):
        ticket = await tasks[number]
        assert admitted[-1] == number
        ticket.release(started=True)
    assert (admission.waiting.requests, admission.waiting.tokens) == (0, 0)
