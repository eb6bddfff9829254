"""A model's own `is_ready`, asked of its process."""

import asyncio
import os
import signal
from pathlib import Path

import pytest

from charonia.classic_backends.python import python_runtime

from ..asking import answers
from .python_models import python_model, request, values

NOT_READY = "Model 'model' is not ready (user-defined check failed)."
EXECUTE = "def execute(self, requests): return [y(os.getpid()) for r in requests]\n"


async def test_the_model_says_whether_it_is_ready(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    answer = tmp_path / "answer"
    body = f"{EXECUTE}async def is_ready(self): return eval(open({str(answer)!r}).read())"
    async with python_model(tmp_path, body) as model:
        for text, ready, said in (
            ("True", True, []),
            ("False", False, ["is not ready: is_ready returned False"]),
            ("not True", False, []),
            ("1 / 0", False, ["is not ready: ZeroDivisionError: division by zero"]),
            ("1", False, ["is not ready: TypeError: is_ready must return a bool, not 'int'"]),
            ("True", True, ["is ready again"]),
        ):
            answer.write_text(text)
            caplog.clear()
            assert await model.unready_reason() == ("" if ready else NOT_READY)
            lines = [message.partition("\n")[0] for message in caplog.messages]
            assert lines == [f"instance 'model_0_0' {each}" for each in said]
            assert model.stats().ready


async def test_many_who_ask_share_a_check_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    count, closed = tmp_path / "count", tmp_path / "closed"
    closed.touch()
    body = f"""
{EXECUTE}
def is_ready(self):
    with open({str(count)!r}, "a") as file:
        file.write("x")
    while os.path.exists({str(closed)!r}):
        time.sleep(0.01)
    return True
"""
    async with python_model(tmp_path, body) as model:
        monkeypatch.setattr(python_runtime, "_CHECK_SECONDS", 0.1)
        for _ in range(2):
            assert await asyncio.gather(*(model.unready_reason() for _ in range(20))) == [NOT_READY] * 20
        [response] = await answers(model, request(1))  # the instance executes meanwhile
        assert count.read_text() == "x"
        assert "not ready: is_ready did not return within 0.1 s" in caplog.text
        monkeypatch.undo()
        waiting = [asyncio.create_task(model.unready_reason()) for _ in range(2)]
        await asyncio.sleep(0)
        waiting.pop().cancel()
        closed.unlink()
        assert await waiting.pop() == ""
        closed.touch()
        check = asyncio.create_task(model.unready_reason())
        await asyncio.sleep(0)
        os.kill(values(response)["Y"][0], signal.SIGKILL)
        assert await check == NOT_READY
    assert "not ready: its process ended unexpectedly" in caplog.text
