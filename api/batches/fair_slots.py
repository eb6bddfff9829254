"""Slots that tenants take in turn. Knows nothing of what is done in them."""

import asyncio
from collections import deque


class FairSlots:
    """`count` slots. While some wait, a slot that is free goes to the tenant who had none for the longest time, and
    among that tenant's to the one that has waited longest."""

    def __init__(self, count: int) -> None:
        self.free = count
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}

    async def acquire(self, tenant: str) -> None:
        if self.free and not self._waiting:
            self.free -= 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # granted in the same moment
                self.release()
            raise

    def release(self) -> None:
        self.free += 1
        while self.free and self._waiting:
            tenant = next(iter(self._waiting))
            queue = self._waiting.pop(tenant)
            turn = queue.popleft()
            if queue:
                self._waiting[tenant] = queue  # behind the others
            if not turn.done():
                self.free -= 1
                turn.set_result(None)
