"""How many different adapters run at once, and that none is kept out by those that are asked for all the time."""

import pytest

from charonia.scheduler.adapters import adapter_room
from charonia.scheduler.config import SchedulerConfig

from ..fuzz.scheduler_trial import SchedulerTrial, SchedulerWorld


def trial(max_loras: int) -> SchedulerTrial:
    config = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=64, max_loras=max_loras)
    return SchedulerTrial(SchedulerWorld(blocks=64, live=1000, adapters=4, scheduler=config))


def test_no_more_adapters_run_than_may_and_others_take_the_rows() -> None:
    """One for the model itself, and a second one with an adapter that runs, overtake the third adapter."""
    one = trial(2)
    first, second, third, plain, again = (
        one.arrive(family=0, prompt=4, new=8, adapter=adapter) for adapter in (1, 2, 3, 0, 1)
    )
    assert one.drain() == [first, second, plain, again, third]


def test_without_a_limit_all_run() -> None:
    one = trial(0)
    keys = [one.arrive(family=0, prompt=4, new=4, adapter=adapter) for adapter in (1, 2, 3, 4)]
    assert one.drain() == keys


def test_adapters_that_never_stop_do_not_keep_another_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_room, "MAX_WAIT_STEPS", 6)
    one = trial(1)
    one.arrive(family=0, prompt=1, new=3, adapter=1)
    kept_out = one.arrive(family=0, prompt=1, new=1, adapter=2)
    steps = 0
    while kept_out in one.expected and steps < 40:
        one.arrive(family=0, prompt=1, new=3, adapter=1)
        one.schedule()
        one.apply()
        steps += 1
    assert 6 < steps <= 12


def test_one_that_is_held_may_leave_and_does_not_hold_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_room, "MAX_WAIT_STEPS", 0)
    one = trial(1)
    runs, held, waits = (one.arrive(family=0, prompt=1, new=3, adapter=adapter) for adapter in (1, 2, 1))
    one.schedule()
    one.apply()
    one.leave(held)
    assert one.drain() == [waits]
    assert runs not in one.expected


@pytest.mark.parametrize("adapter", [1, 3], ids=["runs", "new"])
def test_a_background_sequence_that_waits_long_holds_up_no_urgent_one(
    monkeypatch: pytest.MonkeyPatch, adapter: int
) -> None:
    """Neither with the adapter that runs all the time nor with a third one."""
    monkeypatch.setattr(adapter_room, "MAX_WAIT_STEPS", 6)
    one = trial(1)
    one.arrive(family=0, prompt=1, new=3, adapter=1)
    background = [one.arrive(family=0, prompt=1, new=1, priority=1000, adapter=2) for _ in range(2)]
    for _ in range(12):
        one.schedule()
        one.apply()
        one.arrive(family=0, prompt=1, new=3, adapter=1)
    urgent = one.arrive(family=0, prompt=1, new=1, adapter=adapter)
    for _ in range(10):
        one.arrive(family=0, prompt=1, new=8)  # with no adapter, and before the background
        one.schedule()
        one.apply()
    assert [key for key in (*background, urgent) if key in one.expected] == background
    assert one.drain()[-2:] == background


def test_among_those_that_wait_long_the_most_senior_goes_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter_room, "MAX_WAIT_STEPS", 2)
    one = trial(1)
    one.arrive(family=0, prompt=1, new=6, adapter=1)
    late, first, second = (
        one.arrive(family=0, prompt=1, new=2, priority=priority, adapter=adapter)
        for priority, adapter in ((2, 2), (0, 3), (1, 4))
    )
    for _ in range(4):
        one.schedule()
        one.apply()
    junior = one.arrive(family=0, prompt=1, new=2, priority=1, adapter=1)
    assert one.drain() == [first, second, junior, late]
