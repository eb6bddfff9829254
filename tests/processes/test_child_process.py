"""Processes of ours: how they come and go, and what they owe who started them."""

import asyncio
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection

import pytest

from charonia.classic_backends.isolated.instance_process import InstanceProcess, ProcessLost
from charonia.engine.config import EngineConfig, ParallelConfig
from charonia.engine.frontend.core_process import CoreProcess
from charonia.engine.parallel.layout import RankLayout
from charonia.engine.parallel.local_ranks import LocalRanks
from charonia.processes.child_process import ChildProcess

BROKEN = """
from charonia.processes.child_process import show
try:
    raise ValueError("why")
except ValueError as error:
    show(error)
print("ended")
"""


def run(stderr: int) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-c", BROKEN]
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=stderr, text=True, timeout=60, check=True)


def test_who_broke_says_why() -> None:
    done = run(subprocess.PIPE)
    assert done.stderr.endswith("ValueError: why\n")
    assert done.stdout == "ended\n"


def test_who_broke_ends_though_nobody_reads_why() -> None:
    taken, given = os.pipe()
    try:
        os.set_blocking(given, False)
        while True:
            os.write(given, b"x" * 4096)
    except BlockingIOError:
        os.set_blocking(given, True)
        assert run(given).stdout == "ended\n"
    finally:
        os.close(taken)
        os.close(given)


def test_a_child_ends_once_and_everybody_may_ask_how(monkeypatch: pytest.MonkeyPatch) -> None:
    resource_tracker.ensure_running()
    descriptors = len(os.listdir("/proc/self/fd"))
    child = ChildProcess("t", os._exit, 7)
    assert (child.wait(), child.wait(), child.close()) == (7, 7, 7)
    monkeypatch.setattr(os, "kill", None)  # its number may be another process's by now
    child.kill()
    monkeypatch.undo()
    assert child.wait() == 7
    child = ChildProcess("t", time.sleep, 600)
    assert child.wait(0.0) is None
    assert child.close() == -signal.SIGKILL
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_child_that_somebody_else_has_reaped_has_ended() -> None:
    child = ChildProcess("t", os._exit, 7)
    os.waitpid(child.pid, 0)
    child.kill()
    assert child.close() == 255


def end_instance() -> None:
    link = InstanceProcess(Connection.close)
    with pytest.raises(ProcessLost, match="exited with 0"):
        link.receive()
    link.close()


def kill_instance() -> None:
    link = InstanceProcess(Connection.close)
    link.kill("the test")
    link.close()


def kill_ranks() -> None:
    ranks = LocalRanks(EngineConfig(model="", parallel=ParallelConfig(tensor=2)), RankLayout(2, 1))
    ranks.kill()
    assert ranks.exit_reason(0) == ranks.exit_reason(1) == "died (exit code -9)"
    ranks.wait_for_exit(0.0)
    ranks.close()


def kill_core() -> None:
    async def live() -> int:
        link = CoreProcess(EngineConfig(model="", executor="fake"), lambda message: None)
        link.kill()
        return await asyncio.wait_for(link.ended, 30)

    assert asyncio.run(live()) == -signal.SIGKILL


def test_they_come_and_go_in_several_threads_beside_others_that_start_processes() -> None:
    """Whoever starts a process by multiprocessing reaps, in whatever thread, all that it knows of."""
    over = threading.Event()

    def reap() -> None:
        while not over.is_set():
            multiprocessing.active_children()

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)  # threads meet more often
    lives: list[Callable[[], None]] = [end_instance, kill_instance, kill_ranks, kill_core]
    with ThreadPoolExecutor(2 * len(lives)) as threads:
        reaping = [threads.submit(reap) for _ in lives]
        ended = [threads.submit(live) for _ in range(3) for live in lives]
        try:
            for each in ended:
                each.result(60)
        finally:
            over.set()
            sys.setswitchinterval(interval)
        for each in reaping:
            each.result(60)
