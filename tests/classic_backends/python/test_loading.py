"""The loads of Python models: what a model does itself may take as long as it needs, until nobody waits for it."""

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from charonia.classic_backends.batching.instance_pool import RESTART_PAUSE
from charonia.classic_backends.model import ClassicModel
from charonia.classic_backends.python.python_backend import PythonBackend
from charonia.classic_backends.python.python_runtime import FirstAnswer
from charonia.classic_backends.python_stub import messages
from charonia.core.errors import InvalidArgument
from charonia.repository.gateway import InProcessGateway
from charonia.repository.model_source import read_model
from charonia.telemetry.shared_state import ModelServices

from ...waiting import until
from .python_models import config, python_model, write_model

EXECUTE = "\ndef execute(self, requests): pass\n"


def slow(file: Path, before: int = 0) -> str:
    """Statements that note their process, and never end where as many or more have done so before."""
    return f"""
    with open({str(file)!r}, "a") as file:
        print(os.getpid(), file=file)
    if len(open({str(file)!r}).readlines()) > {before}:
        threading.Event().wait()
"""


def noted(file: Path) -> list[int]:
    return [int(line) for line in file.read_text().splitlines()] if file.exists() else []


def is_running(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    return True


def services() -> ModelServices:
    return ModelServices(InProcessGateway(), asyncio.get_running_loop())


async def test_a_limit_holds_for_the_start_of_a_process_alone() -> None:
    answer = FirstAnswer("m", "Failed")
    with pytest.raises(InvalidArgument, match=r"did not start within 0 s \(stub-timeout-seconds\)"):
        answer.wait(0)
    answer = FirstAnswer("m", "Failed")
    answer.on_message(messages.Started())
    waiting = asyncio.create_task(asyncio.to_thread(answer.wait, 0))
    await asyncio.sleep(0.01)
    answer.on_message(messages.Initialized(True))
    answer.on_end("it exited with 0")
    assert await waiting == messages.Initialized(True)


async def test_a_process_that_does_not_start_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit is over once it runs, however long the machine needs for that."""
    wait = FirstAnswer.wait

    def wait_until_it_runs(answer: FirstAnswer, start_seconds: float) -> Any:
        assert start_seconds == 7
        asyncio.run(until(lambda: noted(tmp_path / "pids")))
        return wait(answer, 0)

    monkeypatch.setattr(FirstAnswer, "wait", wait_until_it_runs)
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f"#!/bin/sh\necho $$ > {tmp_path / 'pids'}\nexec sleep 60\n")
    python.chmod(0o755)
    settings = {"EXECUTION_ENV_PATH": str(python.parent.parent), "stub-timeout-seconds": "7"}
    text = r"^Failed to initialize model instance 'model_0_0': its process did not start within 0 s"
    with pytest.raises(InvalidArgument, match=text):
        async with python_model(tmp_path, EXECUTE, parameters=settings):
            pass
    [process] = noted(tmp_path / "pids")
    assert not is_running(process)


async def test_a_load_that_nobody_waits_for_ends(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    version = write_model(tmp_path, f"def initialize(self, args):{slow(file)}{EXECUTE}")
    model = ClassicModel(config(), PythonBackend(services()), version)
    loading = asyncio.create_task(model.load())
    await until(lambda: noted(file))
    loading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await loading
    await until(lambda: not is_running(noted(file)[0]))


async def test_a_model_is_unloaded_while_another_process_initializes(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    body = f"def initialize(self, args):{slow(file, before=1)}{EXECUTE}"
    async with python_model(tmp_path, body, parameters={RESTART_PAUSE: "0"}):
        os.kill(noted(file)[0], 9)
        await until(lambda: len(noted(file)) == 2)
    assert not is_running(noted(file)[1])


async def test_a_completion_that_nobody_waits_for_ends(tmp_path: Path) -> None:
    file = tmp_path / "pids"
    body = f"@staticmethod\ndef auto_complete_config(config):{slow(file)}{EXECUTE}"
    write_model(tmp_path, body)
    (tmp_path / "model" / "config.pbtxt").write_text('backend: "python"')
    gateway = InProcessGateway()
    source = read_model(tmp_path / "model")
    loads = (gateway.lifecycle.load(source), gateway.lifecycle.describe(source, lambda: None))
    for number, load in enumerate(loads, 1):
        loading = asyncio.create_task(load)
        await until(lambda number=number: len(noted(file)) == number)
        loading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await loading
        await until(lambda number=number: not is_running(noted(file)[number - 1]))
    await gateway.lifecycle.close()
