"""The keeper of frontends, without any."""

import asyncio
import socket
from typing import Any

import pytest

from charonia.http_workers import supervisor
from charonia.http_workers.supervisor import WorkerPool

from ..waiting import until


class NoHub:
    def start(self) -> None: ...

    async def close(self) -> None: ...


async def test_a_server_that_ends_waits_for_no_frontend_that_is_to_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_FIRST_RETRY", "_LAST_RETRY", "_STOP_SECONDS"):
        monkeypatch.setattr(supervisor, name, 3600.0)
    hub: Any = NoHub()
    pool = WorkerPool(hub, 1, lambda *_: None, None)

    async def fail(*_: object) -> tuple[int, bool]:
        raise OSError("no more processes")

    monkeypatch.setattr(pool, "_run", fail)
    pool._started[0].set()
    await pool.start()
    await until(lambda: next(iter(pool.measure())).readings[0].value == 1)
    async with asyncio.timeout(30):
        await pool.stop(force=False)


async def test_a_frontend_that_does_not_leave_is_killed_without_a_second_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the process only its end: what it waits for may be anything."""
    monkeypatch.setattr(supervisor, "_STOP_SECONDS", 0.1)
    patience: list[float] = []

    class Child:
        sentinel = 0

        def close(self, seconds: float) -> int:
            patience.append(seconds)
            return -9

    class Session:
        def __init__(self, hub: object, name: str, *files: int) -> None:
            self.link, self.listening, self.lost = self, asyncio.Event(), asyncio.Event()
            self.listening.set()

        def stop(self, force: bool) -> None: ...

        def close(self) -> None: ...

    async def watch_for_ever(*_: object) -> None:
        await asyncio.Event().wait()

    async def connect(self: object, *_: object, sock: socket.socket) -> None:
        sock.close()

    hub: Any = NoHub()
    pool = WorkerPool(hub, 1, lambda *_: None, None)
    monkeypatch.setattr(supervisor, "python_child", lambda *_, **__: Child())
    monkeypatch.setattr(supervisor, "WorkerSession", Session)
    monkeypatch.setattr(type(asyncio.get_running_loop()), "create_unix_connection", connect)
    monkeypatch.setattr(pool, "_watch", watch_for_ever)
    pool._started[0].set()
    await pool.start()
    await until(lambda: bool(pool._sessions))
    async with asyncio.timeout(30):
        await pool.stop(force=False)
    assert patience == [0.0]
