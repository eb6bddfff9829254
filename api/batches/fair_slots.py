"""Slots that tenants share evenly. Knows nothing of what is done in them."""

import asyncio
from collections import Counter, deque


class FairSlots:
    """`free` slots. One that becomes free goes to the tenant who holds the fewest of those who wait, and among that
    tenant's to the one that has waited longest."""

    def __init__(self, free: int) -> None:
        self.free = free
        self._held = Counter[str]()
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        self._granting: asyncio.Handle | None = None

    async def acquire(self, tenant: str) -> None:
        if self.free and not self._waiting:
            self.free -= 1
            self._held[tenant] += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # granted in the same moment
                self.release(tenant)
            raise

    def release(self, tenant: str) -> None:
        self.free += 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._grant_soon()

    def _grant_soon(self) -> None:
        # One in a turn of the event loop: who got one may then wait for the next, and counts with it.
        if self._granting is None and self.free and self._waiting:
            self._granting = asyncio.get_running_loop().call_soon(self._grant)

    def _grant(self) -> None:
        self._granting = None
        tenant = min(self._waiting, key=self._held.__getitem__)
        queue = self._waiting[tenant]
        turn = queue.popleft()
        if not queue:
            del self._waiting[tenant]
        if not turn.done():
            self.free -= 1
            self._held[tenant] += 1
            turn.set_result(None)
        self._grant_soon()
