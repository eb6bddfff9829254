"""Waiting for what must happen, on a machine that may be busy with something else."""

import asyncio
from collections.abc import Callable

TIMEOUT = 60.0
"""Seconds."""


async def until(holds: Callable[[], object]) -> None:
    """Look again and again, the loop running meanwhile."""
    async with asyncio.timeout(TIMEOUT):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
