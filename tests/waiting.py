"""Waiting for what must happen, on a machine that may be busy with something else."""

import asyncio
from collections.abc import Callable

PATIENCE = 60.0
"""Seconds."""


async def until(holds: Callable[[], object]) -> None:
    """Look again and again, the loop running meanwhile."""
    async with asyncio.timeout(PATIENCE):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
