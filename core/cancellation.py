"""Waiting for the first of several awaitables."""

import asyncio
from collections.abc import Awaitable
from typing import Any


async def wait_for_first(*waits: Awaitable[Any], timeout: float | None = None) -> None:
    """Return when one of `waits` is done or after `timeout` seconds; the others are then cancelled and awaited.

    Raises what the first one raised.
    """
    tasks = [asyncio.ensure_future(each) for each in waits]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
