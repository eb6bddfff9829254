"""When an execution takes far too long, in seconds that are counted."""

from charonia.classic_backends.batching.instance import ExecutionTimer

SECOND = 1_000_000_000


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now

    def wait(self, seconds: float) -> None:
        self.now += int(seconds * SECOND)


def test_an_execution_is_overdue_after_half_a_minute() -> None:
    watch = ExecutionTimer(clock := Clock())
    clock.wait(100)
    assert not watch.overdue
    watch.start()
    clock.wait(30)
    assert (watch.running_seconds, watch.overdue) == (30, False)
    clock.wait(1)
    assert watch.overdue
    watch.stop()
    assert (watch.running_seconds, watch.overdue) == (0, False)


def test_an_instance_that_is_always_slow_is_given_twenty_times_its_median() -> None:
    watch = ExecutionTimer(clock := Clock())
    for seconds in (1, 3, 500):
        watch.start()
        clock.wait(seconds)
        watch.stop()
        watch.stop()
    watch.start()
    clock.wait(60)
    assert not watch.overdue
    clock.wait(1)
    assert watch.overdue


def test_what_is_beyond_a_limit_is_acted_on_while_it_runs() -> None:
    watch, done = ExecutionTimer(clock := Clock()), list[float]()
    for seconds in (0, 5, 1):
        watch.start()
        clock.wait(seconds)
        watch.call_if_longer_than(5, lambda: done.append(watch.running_seconds))
    assert done == []
    clock.wait(5)
    assert watch.call_if_longer_than(5, lambda: done.append(watch.running_seconds))
    assert done == [6]
    watch.stop()
    assert not watch.call_if_longer_than(0, lambda: done.append(watch.running_seconds))
