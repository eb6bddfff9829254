"""What a process of ours owes the one that started it: not to outlive it, and to leave the signals to it."""

import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import connection, parent_process
from pathlib import Path

PARENTS_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})
"""Ctrl-C and service managers signal the whole group: the frontend decides what that means to everybody else."""


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
