"""The keeper of frontends, without any."""

import asyncio
from typing import Any

import pytest

from charonia.http_workers import supervisor
from charonia.http_workers.supervisor import FrontendPool

from ..waiting import until


class NoHub:
    def start(self) -> None: ...

    async def close(self) -> None: ...


async def test_a_server_that_ends_waits_for_no_frontend_that_is_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIRST_RETRY", "_LAST_RETRY", "_STOP_SECONDS"):
        monkeypatch.setattr(supervisor, name, 3600.0)
    hub: Any = NoHub()
    pool = FrontendPool(hub, 1, lambda *_: None, None)

    async def fail(*_: object) -> tuple[int, bool]:
        raise OSError("no more processes")

    monkeypatch.setattr(pool, "_run", fail)
    pool._started[0].set()
    await pool.start()
    await until(lambda: next(iter(pool.measure())).readings[0].value == 1)
    async with asyncio.timeout(30):
        await pool.stop(force=False)
