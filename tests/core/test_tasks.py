"""Waits that must come to an end."""

import asyncio

import pytest

from charonia.core.tasks import end_within

from ..waiting import until


async def test_what_must_end_is_waited_for_together_and_cancelled_when_it_is_late() -> None:
    ended, cancelled = asyncio.Event(), asyncio.Event()

    async def end() -> None:
        ended.set()

    async def wait_for_ever() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    assert await end_within(0.01, end(), wait_for_ever()) == 1
    await until(cancelled.is_set)
    assert ended.is_set()
    assert await end_within(None, end()) == await end_within(0.0) == 0


async def test_an_error_of_what_ends_is_raised() -> None:
    async def fail() -> None:
        raise OSError("broken")

    with pytest.raises(OSError, match="broken"):
        await end_within(5.0, fail())
