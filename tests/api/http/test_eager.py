"""A coroutine that was begun goes on like any other."""

import asyncio

import pytest

from charonia.api.http.eager import EagerAwaitable, ensure_task


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


async def test_who_needs_a_task_gets_one() -> None:
    tasks = []

    async def work() -> str:
        await ensure_task()
        tasks.append(asyncio.current_task())
        async with asyncio.timeout(60):
            await asyncio.sleep(0)
        return "ended"

    async def rest(begun: EagerAwaitable[str]) -> str:
        return await begun

    made: asyncio.Future[asyncio.Task[str]] = asyncio.get_running_loop().create_future()

    def outside() -> None:
        made.set_result(asyncio.create_task(rest(EagerAwaitable(work()))))

    asyncio.get_running_loop().call_soon(outside)
    task = await made
    assert await task == "ended"
    assert tasks == [task]
