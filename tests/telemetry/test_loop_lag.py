"""The alarm of the event loop's lag, on a loop that is really held up."""

import re
import time
from typing import Any

import pytest

from charonia.telemetry import loop_lag

from ..waiting import TIMEOUT

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
