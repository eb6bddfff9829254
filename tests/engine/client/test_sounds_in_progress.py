"""Encoded windows wait for those that are being encoded by then, as long as it takes, until there are eight, or for a
while."""

import asyncio

import pytest

from charonia.engine.client import sounds_in_progress
from charonia.engine.client.sounds_in_progress import WindowsTogether
from tests.waiting import until


class Windows:
    """Windows in an encoder that ends each when it is told to."""

    def __init__(self) -> None:
        self.together = WindowsTogether()
        self.encoded = [asyncio.Event() for _ in range(12)]
        self.begun: list[int] = []
        self.tasks = [asyncio.create_task(self._run(number)) for number in range(12)]

    async def _run(self, number: int) -> None:
        with self.together.encode(12):
            await self.encoded[number].wait()
        await self.together.gather(12)
        self.begun.append(number)

    async def finish(self, *numbers: int) -> None:
        """Let these be encoded, and all that follows happen."""
        await asyncio.sleep(0)
        for number in numbers:
            self.encoded[number].set()
        for _ in range(8):
            await asyncio.sleep(0)

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_a_window_alone_waits_for_nothing() -> None:
    together = WindowsTogether()
    with together.encode(1):
        pass
    await asyncio.wait_for(together.gather(1), 2)


async def test_windows_begin_when_eight_wait_and_when_all_are_encoded() -> None:
    windows = Windows()
    await windows.finish(*range(7))
    assert windows.begun == []
    await windows.finish(7)
    assert sorted(windows.begun) == list(range(8))
    await windows.finish(8, 9, 10)
    assert len(windows.begun) == 8
    await windows.finish(11)
    assert sorted(windows.begun) == list(range(12))
    await windows.close()


@pytest.mark.parametrize("windows", [1, 2])
async def test_none_waits_for_windows_that_come_later_or_are_of_longer_sounds(windows: int) -> None:
    """A sound of so many windows beside one of two, whose windows never end."""
    together, long, begun = WindowsTogether(), [asyncio.Event() for _ in range(3)], list[str]()

    async def write_down(name: str, encoded: asyncio.Event, windows: int = 2) -> None:
        with together.encode(windows):
            await encoded.wait()
        await together.gather(windows)
        begun.append(name)

    short = asyncio.Event()
    tasks = [
        asyncio.create_task(write_down("first", long[0])),
        asyncio.create_task(write_down("short", short, windows)),
    ]
    await asyncio.sleep(0)
    short.set()
    for _ in range(4):
        await asyncio.sleep(0)
    tasks += [asyncio.create_task(write_down(name, event)) for name, event in zip("bc", long[1:], strict=True)]
    await asyncio.sleep(0)
    assert begun == ["short"] * (windows == 1)
    long[0].set()
    await until(lambda: begun == ["short"])
    for event in long[1:]:
        event.set()
    await asyncio.gather(*tasks)


async def test_one_whose_sound_is_given_up_keeps_no_other() -> None:
    windows = Windows()
    await windows.finish(0)
    for task in windows.tasks[1:]:
        task.cancel()
    await until(lambda: windows.begun == [0])
    await windows.close()


async def test_one_that_is_given_up_while_it_waits_is_not_counted() -> None:
    windows = Windows()
    await windows.finish(*range(7))
    windows.tasks[0].cancel()
    await windows.finish()
    await windows.finish(7)
    assert windows.begun == []
    await windows.finish(8)
    assert sorted(windows.begun) == list(range(1, 9))
    await windows.close()


async def test_none_waits_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sounds_in_progress, "_LONGEST_WAIT", 0.01)
    windows = Windows()
    await windows.finish(0, 1)
    await until(lambda: sorted(windows.begun) == [0, 1])
    await windows.close()
