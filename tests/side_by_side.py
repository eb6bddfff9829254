"""Files of tests side by side, in forks of the process that has collected them all: a plugin of tests/conftest.py.

A worker of pytest-xdist imports and collects all tests itself, which takes the processor longer than to run a thousand.
"""

import os
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from multiprocessing import connection
from types import SimpleNamespace
from typing import Any

import pytest
from _pytest.tmpdir import TempPathFactory

Group = Sequence[pytest.Item]
"""Tests that one worker runs, one after the other."""


@dataclass
class Worker:
    """A fork that runs groups of tests, as the main process knows it."""

    pid: int
    pipe: connection.Connection
    nodeid: str = ""
    """The test that it runs."""


class SideBySide:
    """Runs what was collected in so many workers, each of which takes the next group when it has none."""

    def __init__(self, count: int, group_of: Callable[[pytest.Item], str]) -> None:
        """Tests with the same `group_of(item)` are a group."""
        self._count, self._group_of = count, group_of
        self._workers: list[Worker] = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if session.testsfailed or session.config.option.collectonly:
            return None  # pytest's own loop knows what to do
        assert threading.active_count() == 1, "a fork has the thread that forks alone"
        _temporary(session).getbasetemp()  # removes one that is there, which the workers' folders lie in
        session.items.sort(key=_order(session.items, self._group_of))
        groups = [[*group] for _, group in groupby(session.items, self._group_of)]
        try:
            for number in range(min(self._count, len(groups))):
                self._workers.append(_fork_worker(session, number, groups, [worker.pipe for worker in self._workers]))
            self._follow(session, iter(range(len(groups))))
        finally:
            for worker in self._workers:
                worker.pipe.close()
            for worker in self._workers:
                os.waitpid(worker.pid, 0)
        return True

    def _follow(self, session: pytest.Session, groups: Iterator[int]) -> None:
        """Give groups to the workers and take their reports, until all have ended; raises `Failed` with the first."""
        hook = session.config.hook
        running = {worker.pipe: worker for worker in self._workers}
        while running:
            for pipe in connection.wait([*running]):
                worker = running[pipe]  # type: ignore[index]
                try:
                    kind, content = worker.pipe.recv()
                except (EOFError, ConnectionResetError):
                    kind, content = "lost", None
                match kind:
                    case "next":
                        worker.pipe.send(next(groups, None))
                    case "start":
                        worker.nodeid, location = content
                        hook.pytest_runtest_logstart(nodeid=worker.nodeid, location=location)
                    case "report":
                        report = hook.pytest_report_from_serializable(config=session.config, data=content)
                        hook.pytest_runtest_logreport(report=report)
                    case "lost":
                        hook.pytest_runtest_logreport(report=_lost(worker))
                        session.shouldfail = "a worker has ended"
                    case "end":
                        del running[pipe]  # type: ignore[arg-type]
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)


def _order(items: Group, group_of: Callable[[pytest.Item], str]) -> Callable[[pytest.Item], int]:
    """The key that brings a group's tests together, where the first of them is."""
    places: dict[str, int] = {}
    for item in items:
        places.setdefault(group_of(item), len(places))
    return lambda item: places[group_of(item)]


def _lost(worker: Worker) -> pytest.TestReport:
    text = f"the process of this test, {worker.pid}, has ended"
    return pytest.TestReport(worker.nodeid, (worker.nodeid, None, worker.nodeid), {}, "failed", text, "call")


def _fork_worker(
    session: pytest.Session, number: int, groups: Sequence[Group], others: Sequence[connection.Connection]
) -> Worker:
    ours, theirs = connection.Pipe()
    if pid := os.fork():
        theirs.close()
        return Worker(pid, ours)
    for pipe in (ours, *others):
        pipe.close()
    status = 1
    try:
        _begin(session, number)
        session.config.pluginmanager.register(_Reports(session, theirs))
        _run_groups(session, groups, theirs)
        session.config._ensure_unconfigure()
        theirs.send(("end", None))
        status = 0
    except (BrokenPipeError, ConnectionResetError, EOFError, KeyboardInterrupt):
        pass  # the main process has ended the run
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def _begin(session: pytest.Session, number: int) -> None:
    """Give this fork what it must not share: where output is captured, the folder of temporary files."""
    plugins = session.config.pluginmanager
    terminal = plugins.unregister(name="terminalreporter")
    plugins.register(SimpleNamespace(_tw=terminal._tw), "terminalreporter")  # for what is said of a test that hangs
    capture = plugins.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    factory = _temporary(session)
    factory._basetemp = factory.getbasetemp() / str(number)
    factory._basetemp.mkdir(0o700)


def _temporary(session: pytest.Session) -> TempPathFactory:
    factory: TempPathFactory = session.config._tmp_path_factory  # type: ignore[attr-defined]
    return factory


class _Reports:
    """In a worker: what happens, for the main process. That a test was set up, or cleaned up after, is told where
    durations are asked for."""

    def __init__(self, session: pytest.Session, pipe: connection.Connection) -> None:
        self._config, self._pipe = session.config, pipe

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        self._pipe.send(("start", (nodeid, location)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or not report.passed or self._config.option.durations:
            data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
            self._pipe.send(("report", data))


def _run_groups(session: pytest.Session, groups: Sequence[Group], pipe: connection.Connection) -> None:
    def next_group() -> list[pytest.Item]:
        pipe.send(("next", None))
        index = pipe.recv()
        return [] if index is None else [*groups[index]]

    waiting = next_group()
    try:
        while waiting:
            item = waiting.pop(0)
            # What is torn down after a group's last test depends on which group is next.
            waiting = waiting or next_group()
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=waiting[0] if waiting else None)
    finally:
        session._setupstate.teardown_exact(None)
