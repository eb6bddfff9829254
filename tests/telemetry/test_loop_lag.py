"""The alarm of the event loop's lag, on a loop that is really held up."""

import asyncio
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import uvloop

from charonia.telemetry import loop_lag

from ..waiting import TIMEOUT


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run])
def test_a_loop_that_waits_for_work_is_not_blamed(run: Callable[[Any], None]) -> None:
    """As when the process was stopped: by the time that somebody looks nothing holds it."""
    begun, loops = threading.Event(), list[asyncio.AbstractEventLoop]()

    async def idle() -> None:
        loops.append(asyncio.get_running_loop())
        begun.set()
        await asyncio.sleep(TIMEOUT)

    def serve() -> None:
        with suppress(asyncio.CancelledError):
            run(idle())

    thread = threading.Thread(target=serve)
    thread.start()
    assert begun.wait(TIMEOUT)
    assert thread.ident is not None
    blamed, until = "", time.monotonic() + TIMEOUT
    while "nothing that still runs" not in blamed and time.monotonic() < until:
        blamed = loop_lag._holder(thread.ident)
    loops[0].call_soon_threadsafe(lambda: [task.cancel() for task in asyncio.all_tasks(loops[0])])
    thread.join()
    assert "nothing that still runs" in blamed


HOLDS = """
def hold(alarm, seconds):
    until = time.monotonic() + seconds
    while not alarm.text and time.monotonic() < until:
        time.sleep(0.01)
"""


@pytest.mark.parametrize("names", [{loop_lag.HOLDER: "pipeline 'x'"}, {}])
async def test_the_log_names_the_code_that_holds_the_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, names: dict[str, str]
) -> None:
    monkeypatch.setattr(loop_lag, "_PROBE_INTERVAL", 0.01)
    monkeypatch.setattr(loop_lag, "_ALARM", 0.02)
    module: dict[str, Any] = {"time": time, **names}
    exec(compile(HOLDS, "pipeline.py", "exec"), module)
    with loop_lag.LoopLag(bound=5):
        module["hold"](caplog, TIMEOUT)
    said = r"pipeline 'x', at " if names else ""
    assert re.fullmatch(
        rf"the event loop has been held for \S+ s, by {said}pipeline\.py:\d in hold", caplog.messages[0]
    )


def test_a_thread_is_busy_by_all_of_the_window() -> None:
    now, computed = iter(range(5)), iter([0.0, 1.0, 1.9, 2.7, 3.0])
    window = loop_lag.BusyWindow(2, lambda: float(next(now)), lambda: next(computed))
    assert [window.look() for _ in range(5)] == pytest.approx([0.0, 0.0, 0.95, 0.85, 0.55])
