"""A coroutine that was begun goes on like any other."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import pytest

from charonia.api.http.eager import EagerAwaitable, run_without_task, start_eagerly


async def test_what_does_not_wait_is_done_at_once() -> None:
    async def work() -> int:
        return 5

    begun = EagerAwaitable(work())
    assert begun.done
    assert await begun == 5


async def test_what_fails_at_once_raises_at_once() -> None:
    async def work() -> None:
        raise ValueError("now")

    with pytest.raises(ValueError, match="now"):
        EagerAwaitable(work())


async def test_what_waits_is_resumed() -> None:
    gates = [asyncio.Event(), asyncio.Event()]

    async def work() -> str:
        await gates[0].wait()
        await asyncio.sleep(0)
        await gates[1].wait()
        return "ended"

    begun = EagerAwaitable(work())
    assert not begun.done
    loop = asyncio.get_running_loop()
    loop.call_soon(gates[0].set)
    loop.call_soon(gates[1].set)
    assert await begun == "ended"
    assert begun.done


async def test_errors_come_through_later_too() -> None:
    async def work() -> None:
        await asyncio.sleep(0)
        raise ValueError("later")

    with pytest.raises(ValueError, match="later"):
        await EagerAwaitable(work())


async def test_cancelling_reaches_it() -> None:
    ended = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await asyncio.sleep(0)
            raise
        finally:
            ended.append(True)

    async def whole() -> None:
        await EagerAwaitable(work())

    task = asyncio.create_task(whole())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended == [True]


async def test_errors_of_what_it_waits_for_may_be_caught() -> None:
    async def work() -> str:
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(future.set_exception, ValueError("x"))
        try:
            await future
        except ValueError:
            return "caught"
        return "missed"

    assert await EagerAwaitable(work()) == "caught"


@pytest.mark.parametrize("error", [None, ValueError("x"), asyncio.CancelledError()])
async def test_without_a_task_it_goes_on_when_what_it_waits_for_is_done(error: BaseException | None) -> None:
    loop = asyncio.get_running_loop()
    gate: asyncio.Future[str] = loop.create_future()
    steps: list[Any] = []
    ended: asyncio.Future[BaseException | None] = loop.create_future()

    async def work() -> None:
        steps.append("begun")
        await asyncio.sleep(0)
        steps.append(await gate)
        if error is not None:
            raise error

    run_without_task(work(), ended.set_result)
    assert steps == ["begun"]
    await asyncio.sleep(0)
    gate.set_result("passed")
    assert await ended is error
    assert steps == ["begun", "passed"]


async def test_without_a_task_it_gets_the_errors_of_what_it_waits_for() -> None:
    gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    ended: asyncio.Future[BaseException | None] = asyncio.get_running_loop().create_future()

    async def work() -> None:
        with pytest.raises(ValueError, match="x"):
            await gate

    run_without_task(work(), ended.set_result)
    gate.set_exception(ValueError("x"))
    assert await ended is None


async def started(work: Coroutine[Any, Any, None]) -> asyncio.Task[None] | None:
    """As a protocol does it, in no task."""
    result: asyncio.Future[asyncio.Task[None] | None] = asyncio.get_running_loop().create_future()
    asyncio.get_running_loop().call_soon(lambda: result.set_result(start_eagerly(work)))
    return await result


async def test_a_start_that_never_waits_makes_no_task() -> None:
    done = []

    async def work() -> None:
        done.append(asyncio.current_task())

    assert await started(work()) is None
    assert done[0] is not None


@pytest.mark.parametrize("seconds", [0.001, 60])
async def test_a_timeout_that_begins_before_there_is_a_task_ends_it(seconds: float) -> None:
    ended = []

    async def work() -> None:
        try:
            async with asyncio.timeout(seconds):
                await asyncio.sleep(0.05)
            ended.append("in time")
        except TimeoutError:
            ended.append("late")
        assert asyncio.current_task().cancelling() == 0  # type: ignore[union-attr]

    task = await started(work())
    assert task is not None
    await task
    assert ended == ["late" if seconds < 1 else "in time"]


async def test_a_task_group_that_begins_before_there_is_a_task() -> None:
    async def fail() -> None:
        raise ValueError("x")

    caught = []

    async def work() -> None:
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(fail())
                await asyncio.sleep(60)
        except* ValueError:
            caught.append(True)

    task = await started(work())
    assert task is not None
    await task
    assert caught
    assert task.cancelling() == 0


async def test_cancelled_before_there_is_a_task() -> None:
    async def work() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        task.cancel()
        task.uncancel()
        assert task.cancelling() == 1
        await asyncio.sleep(60)

    task = await started(work())
    assert task is not None
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_a_cancellation_that_comes_before_the_tasks_first_step_reaches_what_has_begun() -> None:
    ended: list[bool] = []

    async def work(wait: Callable[[], Awaitable[object]]) -> None:
        try:
            await wait()
        finally:
            await asyncio.sleep(0)
            ended.append(True)

    def begin_and_cancel(wait: Callable[[], Awaitable[object]]) -> "asyncio.Task[None]":
        task = start_eagerly(work(wait))
        assert task is not None
        task.cancel()
        return task

    for wait in (
        asyncio.Event().wait,
        lambda: asyncio.sleep(0),
        lambda: asyncio.create_task(asyncio.sleep(60)),
        lambda: asyncio.gather(asyncio.sleep(60), asyncio.sleep(60)),
    ):
        made: asyncio.Future[asyncio.Task[None]] = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(lambda made=made, wait=wait: made.set_result(begin_and_cancel(wait)))
        with pytest.raises(asyncio.CancelledError):
            await (await made)
        assert ended.pop()
    assert asyncio.all_tasks() == {asyncio.current_task()}, "what it waited for is cancelled, too"


async def test_within_a_task_it_starts_as_any_task_does() -> None:
    begun = []

    async def work() -> None:
        begun.append(1)

    task = start_eagerly(work())
    assert task is not None
    assert not begun
    await task
    assert begun


@pytest.mark.parametrize("begin", [EagerAwaitable, start_eagerly])
async def test_others_may_await_meanwhile_what_it_waits_for(begin: Callable[[Any], Any]) -> None:
    # As the steps of an ensemble await the one whose tensor they share.
    shared = asyncio.get_running_loop().create_future()
    got = list[str]()

    async def reader(name: str) -> None:
        got.append(f"{name} {await shared}")

    async def begin_first() -> None:
        begun = begin(reader("first"))
        others = [asyncio.create_task(reader("second")), asyncio.create_task(reader("third"))]
        await asyncio.sleep(0)
        asyncio.get_running_loop().call_soon(shared.set_result, "tensor")
        await begun
        await asyncio.gather(*others)

    await asyncio.wait_for(begin_first(), 10)
    assert sorted(got) == ["first tensor", "second tensor", "third tensor"]
