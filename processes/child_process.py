"""Starts processes of ours, and says what they owe who started them: not to outlive it, to leave the signals to it, to
end when they broke."""

import atexit
import os
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection, get_context, parent_process, resource_tracker
from multiprocessing.popen_spawn_posix import Popen
from pathlib import Path
from typing import Any

from .stderr import write_stderr

STOP_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
"""Ctrl-C and service managers signal the whole group: the frontend decides what that means to everybody else."""

_KILL_RETRY_SECONDS = 1.0
"""How long a process that was killed may take before it is killed again."""
_UNKNOWN_EXIT_CODE = 255
"""The exit code of a process that was reaped by someone else; asyncio's word for it."""
_STDERR_SECONDS = 1.0
"""How long a pipe may take what somebody reads from it."""


class ChildProcess:
    """A process of its own, `name`, that runs `target(*arguments)`: started, waited for, killed and closed here alone.

    For any thread, and nothing here raises for what became of the process. It is not in multiprocessing's own list of
    children: each `ProcessStats.start()`, in whatever thread and of whatever library, reaps all that are in there, and
    those
    that wait for them meanwhile are told that there are none. It is started deaf to what stops servers: signals may
    reach the whole group before it has left them to its parent. What still runs at the interpreter's end is killed.

    `sentinel`: a descriptor that can be read as soon as the process has ended.

    Raises:
        OSError: there can be no process.
    """

    def __init__(self, name: str, target: Callable[..., None], *arguments: Any) -> None:
        process = get_context("spawn").Process(target=target, args=arguments, name=name)
        resource_tracker.ensure_running()  # it is started with the first process, and would make this one hear again
        before = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            self._launched = Popen(process)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self.pid: int = self._launched.pid
        self.sentinel = _sentinel(self._launched)
        self._exit_code: int | None = None
        self._lock = threading.Lock()
        atexit.register(self.kill)

    def wait(self, seconds: float | None = None) -> int | None:
        """Its exit code, minus the number of a signal that ended it; None if it still runs after so many seconds."""
        if self._reap() is None:
            connection.wait([self.sentinel], seconds)
        return self._reap()

    def kill(self) -> None:
        """End it as kill -9 would; does not wait for it."""
        with self._lock:
            if self._exit_code is None:
                with suppress(ProcessLookupError):
                    os.kill(self.pid, signal.SIGKILL)

    def close(self, patience: float = 0.0) -> int:
        """Its exit code when it has ended, killed after `patience` seconds. Nobody waits for it any more."""
        exit_code = self.wait(patience)
        while exit_code is None:
            self.kill()
            exit_code = self.wait(_KILL_RETRY_SECONDS)
        atexit.unregister(self.kill)
        if self.sentinel != self._launched.sentinel:
            os.close(self.sentinel)
        self._launched.close()
        return exit_code

    def _reap(self) -> int | None:
        with self._lock:
            if self._exit_code is None:
                try:
                    reaped, status = os.waitpid(self.pid, os.WNOHANG)
                except ChildProcessError:  # somebody waits for all processes, or the system is told to
                    self._exit_code = _UNKNOWN_EXIT_CODE
                else:
                    self._exit_code = os.waitstatus_to_exitcode(status) if reaped else None
            return self._exit_code


def _sentinel(launched: Popen) -> int:
    """multiprocessing's own closes with the process's descriptors, before it can be reaped; and what the process leaves
    behind may hold it."""
    try:
        return os.pidfd_open(launched.pid)
    except (AttributeError, OSError):  # no Linux, an old one, or no descriptors left
        return launched.sentinel


def ignore_stop_signals() -> None:
    """Be deaf to them, however this process was started."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def set_process_name(name: str) -> None:
    """Be `name`, of at most 15 characters, to ps, top and pkill."""
    with suppress(OSError):  # Linux alone has it
        Path("/proc/self/comm").write_text(name)


def die_with_parent(bury: Callable[[], None] = lambda: None) -> None:
    """However the parent ends, kill -9 included, this process ends too, after `bury`."""
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_exit_after, args=(parent.sentinel, bury), name="parent", daemon=True).start()


def _exit_after(parent: int, bury: Callable[[], None]) -> None:
    connection.wait([parent])
    bury()
    os._exit(1)


def print_traceback(error: BaseException) -> None:
    """Its traceback on stderr, unless that is a pipe that nobody reads: who waits there never ends."""
    write_stderr("".join(traceback.format_exception(error))).join(_STDERR_SECONDS)
