"""The server's end of a Python model's process: what it opens is closed once, and by itself alone."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest
import uvloop

from charonia.classic_backends.python.stub_process import StubProcess


class Listening:
    """Hears how the process ended."""

    def __init__(self) -> None:
        self.ended = asyncio.get_running_loop().create_future()

    def on_message(self, message: Any) -> None: ...

    def on_end(self, how: str) -> None:
        self.ended.set_result(how)


def descriptors() -> set[str]:
    """Number and target of each, but for the one of /dev/null that libuv keeps for later."""
    found = {f"{link.name} {os.readlink(link)}" for link in Path("/proc/self/fd").iterdir() if link.exists()}
    return {each for each in found if not each.endswith("/dev/null")}


async def lose_a_process() -> None:
    listener, before = Listening(), descriptors()
    process = StubProcess("m_0", listener)
    own = descriptors() - before
    await process.connect()
    process.kill()
    assert await listener.ended == "it was ended by SIGKILL"
    # A number that something else closed may be another file's by the time that it is closed again.
    assert {each for each in own if "socket" not in each} <= descriptors()
    await process.close(0)
    assert descriptors() <= before


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_nothing_else_closes_its_descriptors(run: Any) -> None:
    run(lose_a_process())


async def test_a_process_that_is_not_reached_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: Any, **__: Any) -> None:
        raise OSError("no more descriptors")

    before = descriptors()
    process = StubProcess("m_0", Listening())
    monkeypatch.setattr(asyncio.get_running_loop(), "create_unix_connection", refuse, raising=False)
    with pytest.raises(OSError, match="no more descriptors"):
        await process.connect()
    with pytest.raises(ChildProcessError):
        os.waitpid(process.pid, os.WNOHANG)  # noqa: ASYNC222 - which does not wait
    assert descriptors() <= before
