"""When an execution takes far too long, in seconds that are counted; and the wait for lost instances."""

import asyncio

from charonia.classic_backends.batching.instance import ExecutionTimer
from charonia.classic_backends.batching.instance_pool import InstancePool
from charonia.core.runtime import InstancePlacement, Runtime

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


def never(placement: InstancePlacement) -> Runtime:
    raise AssertionError(placement)


async def test_who_waits_for_another_instance_waits_on_when_that_is_lost_at_once() -> None:
    pool = InstancePool(never)
    assert not await pool.are_replaced_within(60), "none is to come"
    leave = asyncio.Event()

    def lose_again(task: asyncio.Task[None]) -> None:
        pool._replacing.discard(task)
        second = asyncio.create_task(asyncio.sleep(0.01))
        pool._replacing.add(second)
        second.add_done_callback(pool._replacing.discard)

    first = asyncio.create_task(asyncio.sleep(0))
    pool._replacing.add(first)
    first.add_done_callback(lose_again)
    assert await pool.are_replaced_within(60)

    stays = asyncio.ensure_future(leave.wait())
    pool._replacing.add(stays)  # type: ignore[arg-type]
    assert not await pool.are_replaced_within(0.01)
    leave.set()
    await stays
