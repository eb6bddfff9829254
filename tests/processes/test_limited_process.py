"""A call that takes more than it may costs the process its life, and nothing else anything."""

import os
import time
from collections.abc import Iterator

import pytest

from charonia.processes.host import LAST_NICENESS, PATIENT_NICENESS
from charonia.processes.limited_process import Answer, CallLimits, CallLost, LimitedProcess, TimeLimitExceeded

ROOM = CallLimits(seconds=30.0, memory=64 << 20)


def make(greeting: str) -> Answer:
    def answer(message: bytes) -> bytes:
        match message:
            case b"sleep":
                time.sleep(60)
            case b"nap":
                time.sleep(0.3)
            case b"spin":
                while True:
                    pass
            case b"eat":
                return b"x" * (1 << 27)
            case b"end":
                os._exit(3)
        return greeting.encode() + message

    return answer


@pytest.fixture
def process() -> Iterator[LimitedProcess]:
    process = LimitedProcess("charonia-test", make, "hello ")
    yield process
    if process.alive:
        process.close()


def test_it_answers_one_call_after_the_other(process: LimitedProcess) -> None:
    assert [process.call(name, ROOM) for name in (b"a", b"b")] == [b"hello a", b"hello b"]
    assert len(process.call(b"x" * (1 << 20), ROOM)) == (1 << 20) + 6


def test_what_is_idle_gives_way_from_its_start_on() -> None:
    """Its imports take seconds, in which steps of an engine took thrice their time."""
    process = LimitedProcess("charonia-test", make, "hello ", niceness=LAST_NICENESS)
    lowest = min(19, os.getpriority(os.PRIO_PROCESS, 0) + PATIENT_NICENESS)
    assert os.getpriority(os.PRIO_PROCESS, process._process.pid) >= lowest
    assert process.call(b"a", ROOM) == b"hello a"
    process.close()


@pytest.mark.skipif(not hasattr(os, "SCHED_IDLE"), reason="there is no such class here")
def test_what_nothing_but_patient_work_waits_for_is_idle_from_its_start_on() -> None:
    process = LimitedProcess("charonia-test", make, "hello ", niceness=LAST_NICENESS, starts_in_haste=False)
    assert os.sched_getscheduler(process._process.pid) == os.SCHED_IDLE
    assert process.call(b"a", ROOM) == b"hello a"
    process.close()


def test_what_takes_too_long_is_killed(process: LimitedProcess) -> None:
    with pytest.raises(TimeLimitExceeded, match=r"more than 0.05 s"):
        process.call(b"sleep", ROOM._replace(seconds=0.05))
    assert not process.alive


@pytest.mark.parametrize(("work", "patience"), [(b"sleep", 5.0), (b"spin", 600.0)])
def test_a_patient_caller_counts_what_is_computed(process: LimitedProcess, work: bytes, patience: float) -> None:
    """Whoever waits for a processor is not killed for it, but nobody is waited for without end."""
    assert process.call(b"nap", ROOM._replace(seconds=0.1, patience=600.0)) == b"hello nap"
    with pytest.raises(TimeLimitExceeded, match=r"more than 0.1 s"):
        process.call(work, ROOM._replace(seconds=0.1, patience=patience))
    assert not process.alive


def test_what_takes_too_much_memory_ends_and_what_has_more_room_does_not(process: LimitedProcess) -> None:
    assert len(process.call(b"eat", ROOM._replace(memory=1 << 29))) == 1 << 27
    with pytest.raises(CallLost, match=r"exited with 1|ended by SIGKILL"):  # a second later, on a busy machine
        process.call(b"eat", ROOM)
    assert not process.alive


def test_a_process_that_ends_by_itself_says_how(process: LimitedProcess) -> None:
    with pytest.raises(CallLost, match="it exited with 3"):
        process.call(b"end", ROOM)


def fail() -> Answer:
    raise SystemExit(5)


def test_one_that_does_not_start_says_so() -> None:
    process = LimitedProcess("charonia-test", fail)
    with pytest.raises(CallLost, match="it did not start: it exited with 5"):
        process.call(b"a", ROOM)
    assert not process.alive


def test_one_that_starts_slowly_goes_on_starting(process: LimitedProcess) -> None:
    assert not process.wait_until_ready(0.0)
    assert process.alive
    assert process.wait_until_ready(60.0)
    assert process.call(b"a", ROOM) == b"hello a"
