"""The pool that starts when the event loop is busy: when it does, and what is left if it cannot."""

import asyncio
import logging
import re
from typing import Any

import pytest

from charonia.http_workers import supervisor
from charonia.http_workers.growing_pool import GrowingPool
from charonia.http_workers.hub import ControlHub
from charonia.http_workers.supervisor import WorkerPool
from charonia.repository.builder import ModelBuilder
from charonia.repository.gateway import InProcessGateway
from charonia.telemetry.loop_lag import BusyLimit

from ..waiting import until

AT_ONCE, NEVER = BusyLimit(-1.0, 0.01), BusyLimit(1.0, 0.01)
PLENTY = 1 << 40


def exit_at_once(*_: object) -> None:
    """The whole process of a frontend that cannot be started."""


def make_pool(count: int, main: Any = exit_at_once) -> WorkerPool:
    gateway = InProcessGateway(end_listeners=(), builder=ModelBuilder({}, True))
    hub: Any = ControlHub(gateway, None, None)  # type: ignore[arg-type]
    return WorkerPool(hub, count, main, None)


def grown(pool: WorkerPool, limit: BusyLimit = AT_ONCE, memory: Any = lambda: PLENTY) -> tuple[GrowingPool, list[int]]:
    counts: list[int] = []
    return GrowingPool(pool, limit, counts.append, memory), counts


async def test_frontends_that_end_again_and_again_leave_one_process_and_it_is_said_once(
    caplog: pytest.LogCaptureFixture, started_children: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_RETRY", 0.0)
    workers = make_pool(1)
    pool, counts = grown(workers)
    await pool.start()
    await until(lambda: "goes on as one process" in caplog.text)
    await workers.hub.settle()
    ended = asyncio.ensure_future(pool.ended())
    await asyncio.sleep(0.05)
    assert not ended.done()  # the server goes on
    assert (counts, workers.listening) == ([], 0)
    assert len(re.findall("frontend 1 cannot be started: .*, 3 times", caplog.text)) == 1
    await pool.stop(force=False)
    await ended


class Started(asyncio.Event):
    """A session of a frontend that listens."""

    def __init__(self) -> None:
        super().__init__()
        self.listening, self.lost = asyncio.Event(), asyncio.Event()
        self.listening.set()

    def stop(self, force: bool) -> None:
        self.lost.set()

    def loop_readings(self, labels: object) -> list[Any]:
        return []


async def test_one_that_cannot_be_started_is_done_without(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "_FIRST_RETRY", 0.0)
    caplog.set_level(logging.INFO)
    pool = make_pool(2)

    async def run(number: int, name: str) -> tuple[int, bool]:
        if number == 1:
            raise OSError("no more processes")
        session: Any = Started()
        pool._sessions[number] = session
        pool._started[number].set()
        await session.lost.wait()
        return 0, True

    monkeypatch.setattr(pool, "_run", run)
    growing, counts = grown(pool)
    await growing.start()
    await until(lambda: "1 frontends take new connections" in caplog.text)
    assert (counts, pool.listening) == ([1], 1)
    assert "frontend 2 cannot be started: it cannot be started: no more processes, 3 times" in caplog.text
    await growing.stop(force=False)
    await growing.ended()


async def test_workers_that_run_when_another_breaks_are_ended(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The server says that it goes on as one process: then nobody else may take its connections."""
    pool = make_pool(2)
    session: Any = Started()

    async def run(number: int, name: str) -> tuple[int, bool]:
        if number == 1:
            await pool._started[0].wait()
            raise TypeError("a setup that cannot be sent")
        pool._sessions[number] = session
        pool._started[number].set()
        await session.lost.wait()
        return 0, True

    monkeypatch.setattr(pool, "_run", run)
    growing, counts = grown(pool)
    await growing.start()
    await until(lambda: "a setup that cannot be sent" in caplog.text)
    await until(lambda: pool.listening == 0)
    assert session.lost.is_set()
    await until(lambda: all(keeper.done() for keeper in pool._keepers))
    assert counts == []
    await growing.stop(force=False)
    await growing.ended()


async def test_nothing_starts_without_memory_or_without_need(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    pool = make_pool(2)

    def memory() -> int:
        asked.append(1)
        return 0 if len(asked) < 5 else PLENTY

    async def start() -> list[Any]:
        return []

    monkeypatch.setattr(pool, "start_possible", start)
    idle, never = grown(pool, NEVER)
    growing, counts = grown(pool, memory=memory)
    await idle.start()
    await growing.start()
    await until(lambda: counts == [2])
    assert len(asked) == 5
    assert caplog.text.count("there is no memory for 2 frontends: they want 512 MiB free, and 0 are") == 1
    assert never == []
    await idle.stop(force=False)
    await growing.stop(force=False)


async def test_a_server_that_exits_starts_none_and_waits_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = asyncio.Event()
    pool = make_pool(1)

    async def run(number: int, name: str) -> tuple[int, bool]:
        begun.set()
        await pool._stopping.wait()
        return 0, False

    monkeypatch.setattr(pool, "_run", run)
    growing, counts = grown(pool)
    await growing.start()
    await begun.wait()
    async with asyncio.timeout(30):
        await growing.stop(force=False)
        await growing.ended()
    exiting = make_pool(1)
    exiting.hub.gateway.begin_exit()
    growing, more = grown(exiting)
    await growing.start()
    await asyncio.sleep(0.1)
    await growing.stop(force=False)
    assert (counts, more, exiting._keepers) == ([], [], [])


async def test_the_hubs_own_cancellations_reach_the_frontends() -> None:
    """A language model that frontends generate with, too, ends the requests of an id wherever they are."""
    from charonia.engine.client.llm import LlmModel

    sent: list[Any] = []

    class Session:
        listening = asyncio.Event()
        acknowledged = 0

        class link:
            send = sent.append

        def beat(self) -> None: ...

    hub: Any = make_pool(1).hub
    model = LlmModel.__new__(LlmModel)
    model._open = {}
    model.cancel_elsewhere = None
    model.cancel("r")  # of one process: nobody else is told
    hub.sessions.add(Session())

    class Loaded:
        pass

    loaded: Any = Loaded()
    loaded.model = model
    number = hub.census.number_of(loaded)
    model.cancel("r")
    [message] = sent
    assert (message.model, message.request_id) == (number, "r")
