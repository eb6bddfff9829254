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
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from charonia.classic_backends.isolated.isolated_runtime import InstanceProcess, ProcessLost
from charonia.engine.client.core_supervisor import CoreProcess
from charonia.engine.config import EngineConfig, ParallelConfig
from charonia.engine.parallel.local_ranks import LocalRanks
from charonia.engine.parallel.rank_layout import RankLayout
from charonia.processes import child_process
from charonia.processes.child_process import ChildProcess, RestartBackoff, anonymous_file, python_child

BROKEN = """
from charonia.processes.child_process import print_traceback
try:
    raise ValueError("why")
except ValueError as error:
    print_traceback(error)
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
    descriptors = len(os.listdir("/proc/self/fd"))
    child = python_child("t", os._exit, 7)
    assert (child.wait(), child.wait(), child.close()) == (7, 7, 7)
    monkeypatch.setattr(os, "kill", None)  # its number may be another process's by now
    child.kill()
    monkeypatch.undo()
    assert child.wait() == 7
    child = python_child("t", time.sleep, 600)
    assert child.wait(0.0) is None
    assert child.close() == -signal.SIGKILL
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_child_that_somebody_else_has_reaped_has_ended() -> None:
    child = python_child("t", os._exit, 7)
    os.waitpid(child.pid, 0)
    child.kill()
    assert child.close() == 255


def test_a_child_may_be_any_program_and_inherits_what_it_is_given() -> None:
    read, written = os.pipe()
    child = ChildProcess(["/bin/sh", "-c", f"echo said > /dev/fd/{written}; kill -TERM $$; exit 3"], [written])
    os.close(written)
    with open(read) as pipe:
        assert pipe.read() == "said\n"
    assert child.close(60.0) == 3, "it begins deaf to what stops servers"
    with pytest.raises(FileNotFoundError):
        ChildProcess(["/nowhere/python"])


def test_a_function_gets_its_arguments_connections_and_memory() -> None:
    before = len(os.listdir("/proc/self/fd"))
    ours, theirs = multiprocessing.Pipe()
    file = anonymous_file("test")
    os.write(file, b"here ")
    child = python_child("a long name of a child", answer, theirs, file, {"x": 1}, inherited=[file])
    theirs.close()
    name, path, said, stops = ours.recv()
    assert (name, said, os.pread(file, 99, 0)) == ("a long name of ", {"x": 1}, b"here there")
    assert (path, stops) == (sys.path, [True, True])
    ours.close()
    assert child.close(60.0) == 0
    os.close(file)
    assert len(os.listdir("/proc/self/fd")) == before


def answer(connection: Connection, file: int, argument: object) -> None:
    os.write(file, b"there")
    ignored = [signal.getsignal(each) is signal.SIG_IGN for each in (signal.SIGINT, signal.SIGTERM)]
    connection.send((Path("/proc/self/comm").read_text().rstrip("\n"), sys.path, argument, ignored))


def test_a_child_ends_with_its_parent_and_cleans_up(tmp_path: Path) -> None:
    left, pid = tmp_path / "left", tmp_path / "pid"
    program = f"""
import sys, time
from pathlib import Path
from charonia.processes import child_process

def live():
    child_process.on_parent_death(Path({str(left)!r}).unlink)
    Path({str(left)!r}).touch()
    time.sleep(600)

if __name__ == "__main__":
    import orphans
    child = child_process.python_child("orphan", orphans.live)
    Path({str(pid)!r}).write_text(str(child.pid))
    time.sleep(600)
"""
    (tmp_path / "orphans.py").write_text(program)
    with subprocess.Popen([sys.executable, str(tmp_path / "orphans.py")]) as parent:
        wait_until(left.exists)
        parent.kill()
    wait_until(lambda: not left.exists())
    wait_until(lambda: gone(int(pid.read_text())))


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def gone(pid: int) -> bool:
    """Dead; an orphan may stay a zombie where nobody reaps."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def hang_up(connection: Connection, descriptors: tuple[int, int]) -> None:
    connection.close()


def end_instance() -> None:
    link = InstanceProcess(hang_up)
    with pytest.raises(ProcessLost, match="exited with 0"):
        link.receive()
    link.close()


def kill_instance() -> None:
    link = InstanceProcess(hang_up)
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


def test_each_loss_doubles_the_delay_up_to_the_longest() -> None:
    backoff = RestartBackoff(0.5, 30.0, stable=5.0)
    assert [backoff.next_delay() for _ in range(8)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]
    assert [backoff.next_delay(4.9), backoff.next_delay(5.0), backoff.next_delay(1.0)] == [30.0, 0.5, 1.0]


def test_it_never_ends() -> None:
    backoff = RestartBackoff(0.1, 30.0, stable=5.0)
    assert [backoff.next_delay() for _ in range(5000)][-1] == 30.0


def test_a_prepared_child_runs_the_next_call_of_its_name_and_one_without_a_call_ends() -> None:
    before = len(os.listdir("/proc/self/fd"))
    child_process.prepare_child("prepared", __name__, "prelude")
    child_process.prepare_child("idle", __name__, "no such function")
    other, child = python_child("t", os._exit, 8), python_child("prepared", tell)
    assert (other.close(60.0), child.close(60.0)) == (8, 9)
    child_process.drop_prepared_children()
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_prepared_child_that_died_is_replaced() -> None:
    child_process.prepare_child("prepared", "os", "abort")
    [(prepared, _)] = child_process._prepared["prepared"]
    prepared.wait(60.0)
    assert python_child("prepared", os._exit, 7).close(60.0) == 7


_seen: list[str] = []


def prelude() -> None:
    _seen.append("prelude")


def tell() -> None:
    os._exit(9 if _seen else 1)


def test_a_forked_process_does_not_end_the_children_of_its_parent() -> None:
    child = ChildProcess(["sleep", "60"])
    try:
        if not (forked := os.fork()):
            child.kill()
            os._exit(0)
        os.waitpid(forked, 0)
        assert child.wait(0) is None
    finally:
        assert child.close() == -signal.SIGKILL
