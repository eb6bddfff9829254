"""Groups of tasks, and what is left of them."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from charonia.core.tasks import RequestTaskGroup


class Held:
    """Something large that a request holds."""


@pytest.fixture
def no_cycle_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_cycle_collector")
async def test_a_cancelled_group_leaves_nothing() -> None:
    async def request(held: Held) -> None:
        async with RequestTaskGroup() as group:
            group.create_task(asyncio.sleep(60))
            await asyncio.Event().wait()

    held = Held()
    gone, task = weakref.ref(held), asyncio.create_task(request(held))
    del held
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    del task
    assert gone() is None


@pytest.mark.usefixtures("no_cycle_collector")
async def test_a_group_that_fails_leaves_nothing_and_tells_where() -> None:
    async def fail() -> None:
        raise ValueError("no")

    async def request(held: Held) -> list[str]:
        try:
            async with RequestTaskGroup() as group:
                group.create_task(fail())
                await asyncio.Event().wait()
        except* ValueError as errors:
            trace = errors.exceptions[0].__traceback__
            assert trace is not None
            return_value.append(trace.tb_frame.f_code.co_name)
        return return_value

    held, return_value = Held(), list[str]()
    gone = weakref.ref(held)
    assert await asyncio.create_task(request(held)) == ["fail"]
    del held
    await asyncio.sleep(0)
    assert gone() is None
