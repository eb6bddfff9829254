"""Starts processes of ours, and says what they owe who started them: not to outlive it, to leave the signals to it, to
end when they broke."""

import os
import signal
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection, parent_process, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path

from .outage import to_stderr

PARENTS_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
"""Ctrl-C and service managers signal the whole group: the frontend decides what that means to everybody else."""

_TAKEN_SECONDS = 1.0
"""How long a pipe may take what somebody reads from it."""


def start_deaf(process: BaseProcess) -> None:
    """Start it deaf to what stops servers: signals may reach the whole group before it has left them to its parent."""
    resource_tracker.ensure_running()  # it is started with the first process, and would make this one hear again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, PARENTS_SIGNALS)
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_parent() -> None:
    """Be deaf to them, however this process was started."""
    for number in PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, PARENTS_SIGNALS)


def show_name(name: str) -> None:
    """Be `name`, of at most 15 characters, to ps, top and pkill."""
    with suppress(OSError):  # Linux alone has it
        Path("/proc/self/comm").write_text(name)


def die_with_parent(bury: Callable[[], None] = lambda: None) -> None:
    """However the parent ends, kill -9 included, this process ends too, after `bury`."""
    parent = parent_process()
    if parent is not None:
        threading.Thread(target=_die_after, args=(parent.sentinel, bury), name="parent", daemon=True).start()


def _die_after(parent: int, bury: Callable[[], None]) -> None:
    connection.wait([parent])
    bury()
    os._exit(1)


def show(error: BaseException) -> None:
    """Its traceback on stderr, unless that is a pipe that nobody reads: who waits there never ends."""
    to_stderr("".join(traceback.format_exception(error))).join(_TAKEN_SECONDS)
