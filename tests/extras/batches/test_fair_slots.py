"""Slots are shared evenly, and none is lost."""

import asyncio
from collections import Counter

from charonia.extras.batches.runner import FairSlots


async def test_tenants_have_the_same_number() -> None:
    """Also where all slots become free in the same moment, and one tenant has three times as many who wait."""
    slots, held = FairSlots(6), Counter[str]()
    for _ in range(6):
        await slots.acquire("busy")

    async def take_one_after_another(tenant: str) -> None:
        while True:
            await slots.acquire(tenant)
            held[tenant] += 1

    tasks = [asyncio.create_task(take_one_after_another(tenant)) for tenant in ("busy", "busy", "busy", "calm")]
    await asyncio.sleep(0)
    for _ in range(6):
        slots.release("busy")
    for _ in range(20):
        await asyncio.sleep(0)
    assert held == {"busy": 3, "calm": 3}
    assert slots.free == 0
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_who_leaves_takes_nothing_along() -> None:
    slots = FairSlots(1)
    await slots.acquire("a")
    waiting, granted = asyncio.create_task(slots.acquire("a")), asyncio.create_task(slots.acquire("b"))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.sleep(0)
    slots.release("a")
    granted.cancel()  # in the moment in which it was granted
    await asyncio.gather(waiting, granted, return_exceptions=True)
    await asyncio.sleep(0)
    assert slots.free == 1
    await asyncio.wait_for(slots.acquire("c"), 5)
