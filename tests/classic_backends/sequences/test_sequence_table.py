"""Who is open, who has a seat, who waits for one, and what time does: over a clock of ours."""

from typing import Any

import pytest

from charonia.classic_backends.batching.inference_job import InferenceJob, SequenceFlags, SequenceId
from charonia.classic_backends.batching.queued_request import QueuedRequest
from charonia.classic_backends.sequences.sequence_config import SlotRules
from charonia.classic_backends.sequences.sequence_table import SequenceTable
from charonia.core.errors import InvalidArgument

from ..asking import queued_request

IDLE = 100


class Asked:
    """A table with `seats` on each of these hosts, and what is asked of it."""

    def __init__(self, hosts: str = "a", seats: int = 1) -> None:
        self.table: SequenceTable = SequenceTable("m", SlotRules(seats, IDLE))
        for host in hosts:
            self.table.add_instance(host)  # type: ignore[arg-type]

    def ask(self, name: SequenceId, now: int = 0, timeout: int = 0, **flags: Any) -> QueuedRequest:
        job = InferenceJob({}, sequence_flags=SequenceFlags(name, **flags))
        request = queued_request(job=job, timeout_ns=timeout)
        self.table.add_request(request, now)
        self.table.assign_slots()
        self.table.check_integrity()
        return request

    def start(self, name: SequenceId, now: int = 0, **fields: Any) -> QueuedRequest:
        return self.ask(name, now, start=True, **fields)

    def answer(self, request: QueuedRequest, now: int = 0) -> None:
        self.table.finish_request(request, now)
        self.table.assign_slots()
        self.table.check_integrity()

    def expire(self, now: int) -> list[SequenceId]:
        late = [sequence.id for sequence in self.table.expire_sequences(now)]
        self.table.assign_slots()
        return late

    def seat(self, request: QueuedRequest) -> tuple[Any, int] | None:
        sequence = self.table.sequence_of(request)
        assert sequence is not None
        return None if sequence.slot is None else (sequence.slot.instance, sequence.slot.row)


def test_the_first_request_must_start_the_sequence() -> None:
    asked = Asked()
    with pytest.raises(InvalidArgument) as refused:
        asked.ask(42)
    assert refused.value.message == (
        "inference request for sequence 42 to model 'm' must specify the START flag "
        "on the first request of the sequence"
    )
    asked.answer(asked.start(42, end=True))
    with pytest.raises(InvalidArgument, match="sequence 42"):
        asked.ask(42)
    assert len(asked.table._open) == 0


def test_instances_share_sequences_and_the_first_rows_go_first() -> None:
    asked = Asked("ab", seats=2)
    requests = [asked.start(name) for name in (1, 2, 3, 4, 5)]
    assert [asked.seat(request) for request in requests] == [("a", 0), ("b", 0), ("a", 1), ("b", 1), None]
    asked.answer(asked.ask(2, end=True))
    assert asked.seat(requests[4]) is None
    asked.answer(requests[1])
    assert asked.seat(requests[4]) == ("b", 0)


def test_seats_cost_nothing_until_they_are_taken() -> None:
    asked = Asked("ab", seats=2**31 - 1)
    requests = [asked.start(name) for name in range(4)]
    assert [asked.seat(request) for request in requests] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    asked.answer(asked.ask(0, end=True))
    asked.answer(requests[0])
    assert (asked.table.used_slots, asked.table.total_slots) == (3, 2**32 - 2)
    assert asked.seat(asked.start(9)) == ("a", 0)


def test_requests_without_a_seat_wait_together_and_in_order() -> None:
    asked = Asked()
    held = asked.start(1)
    first, second, other = asked.start(2), asked.ask(2), asked.start(3)
    assert asked.table.waiting_requests == 3
    asked.answer(held)
    asked.answer(asked.ask(1, end=True))
    assert (asked.seat(first), asked.seat(other)) == (("a", 0), None)
    sequence = asked.table.sequence_of(first)
    assert sequence is not None
    assert list(sequence.pending) == [first, second]


def test_who_is_idle_for_too_long_is_closed_and_who_waits_is_not() -> None:
    asked = Asked(seats=2)
    asked.answer(asked.start(1), now=10)
    computed = asked.start(2)
    assert (asked.table.next_expiry, len(asked.table._open)) == (10 + IDLE, 2)
    asked.expire(9 + IDLE)
    asked.answer(asked.ask(1), now=50)
    asked.expire(10 + IDLE)
    asked.start(3)
    assert (asked.table.waiting_requests, asked.table.next_expiry) == (1, 50 + IDLE)
    asked.expire(50 + IDLE)
    assert (asked.table.waiting_requests, asked.table.next_expiry) == (0, None)
    with pytest.raises(InvalidArgument, match="START"):
        asked.ask(1)
    asked.answer(computed, now=1000)
    asked.table.check_integrity()
    assert asked.table.next_expiry == 1000 + IDLE


def test_the_shortest_time_ends_the_wait_of_a_whole_sequence_for_a_seat() -> None:
    asked = Asked()
    held = asked.start(1, timeout=1)
    late = [asked.start(2, timeout=30), asked.ask(2, timeout=20)]
    asked.start(3)
    assert asked.table.next_expiry == 20
    assert (asked.expire(19), asked.expire(20)) == ([], [2])
    for each in late:
        asked.answer(each)
    assert (asked.table.waiting_requests, asked.table.next_expiry, asked.seat(held)) == (1, None, ("a", 0))
    asked.start(2)


def test_who_got_a_seat_in_time_may_be_computed_for_ever() -> None:
    asked = Asked()
    held, other = asked.start(1, end=True), asked.start(2, timeout=5)
    asked.answer(held, now=4)
    assert (asked.expire(10**9), asked.seat(other), asked.table.next_expiry) == ([], ("a", 0), None)


def test_an_id_may_be_used_again_as_soon_as_its_end_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    asked = Asked(seats=2)
    old, new = asked.start(1, end=True), asked.start(1)
    assert (asked.seat(old), asked.seat(new)) == (("a", 0), ("a", 1))
    assert asked.table.sequence_of(old) is not asked.table.sequence_of(new)
    assert not caplog.records
    asked.start(1)
    assert "sequence 1 starts anew, though it had not ended" in caplog.text
    assert len(asked.table._open) == 1


def test_a_lost_instance_takes_its_sequences_along() -> None:
    asked = Asked("ab")
    lost, other, waits = asked.start(1), asked.start(2), asked.start(3)
    asked.table.remove_instance("a")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="sequence 1"):
        asked.ask(1)
    asked.answer(lost)
    assert (asked.seat(other), asked.seat(waits)) == (("b", 0), None)
    asked.table.add_instance("c")  # type: ignore[arg-type]
    asked.table.assign_slots()
    assert asked.seat(waits) == ("c", 0)
    asked.table.check_integrity()


def test_nothing_is_left_of_what_was_cleared() -> None:
    asked = Asked()
    held, waits = asked.start(1), asked.start(2)
    assert [each.id for each in asked.table.close_all()] == [2]
    for each in (held, waits):
        asked.answer(each)
    assert (len(asked.table._open), asked.table.next_expiry, asked.table.waiting_requests) == (0, None, 0)
