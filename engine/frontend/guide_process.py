"""The process in which constraints are compiled before an engine gets them, and its end in the server.

A hostile constraint costs this process its time or its life, and nothing else anything.
"""

import os
import resource
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

import msgspec

from ...core.errors import Unavailable
from ...core.request import GuidedDecoding
from ...processes.child_process import describe_exit, python_child
from ..grammars.guide_check import CheckedGuide, check_guide, checking_backend

_START_SECONDS = 60.0
_NICE = 15
"""How far the process stands back behind what computes tokens."""


class CheckLimits(NamedTuple):
    """What checking one constraint may cost: `seconds`, and `memory` in bytes beside the process's own."""

    seconds: float = 5.0
    memory: int = 512 << 20


CHECK_LIMITS = CheckLimits()


class GuideProcess:
    """A process that checks constraints, one at a time. For one thread at a time, but for `kill`.

    Raises:
        Unavailable: it cannot be started.
    """

    def __init__(self, special: Mapping[str, int], limits: CheckLimits) -> None:
        self._limits = limits
        self._connection, theirs = Pipe()
        try:
            with theirs:  # the process alone has it then: it closes when that ends
                self._process = python_child("charonia-guides", _main, dict(special), limits.memory, theirs)
        except OSError as error:
            self._connection.close()
            raise Unavailable(f"constraints cannot be checked: {error}") from error
        self.alive = True
        if not self._receive(_START_SECONDS):
            raise Unavailable(f"the process that checks constraints did not start: {describe_exit(self.close())}")

    def check(self, guide: GuidedDecoding) -> CheckedGuide:
        """The verdict on a constraint. Unless `alive` afterwards, it cost the process its life."""
        try:
            self._connection.send_bytes(msgspec.msgpack.encode(guide))
            answer = self._receive(self._limits.seconds)
        except OSError:
            answer = b""
        if answer:
            return msgspec.msgpack.decode(answer, type=CheckedGuide)
        ended = describe_exit(self.close(0.0 if answer is None else 1.0))
        if answer is None:
            return CheckedGuide(error=f"compiling it takes more than {self._limits.seconds:g} s")
        return CheckedGuide(error=f"compiling it takes too much memory, or breaks the library ({ended})")

    def _receive(self, seconds: float) -> bytes | None:
        """The next message; None if there was none in time, empty if the process has ended."""
        try:
            return self._connection.recv_bytes() if self._connection.poll(seconds) else None
        except EOFError:
            return b""

    def kill(self) -> None:
        """End the process; whoever waits for it finds that it has ended."""
        self._process.kill()

    def close(self, timeout: float = 0.0) -> int:
        """End the process, after `timeout` seconds by force; its exit code."""
        self.alive = False
        self._connection.close()
        return self._process.close(timeout)


def _main(special: Mapping[str, int], memory: int, connection: Connection) -> None:
    backend = checking_backend(special)
    os.nice(_NICE)
    _limit_memory(memory)
    connection.send_bytes(b"ready")
    with open(os.devnull, "w") as nothing:  # the library tells of its crashes, as often as a client likes
        os.dup2(nothing.fileno(), 2)
    with suppress(EOFError):
        while True:
            guide = msgspec.msgpack.decode(connection.recv_bytes(), type=GuidedDecoding)
            connection.send_bytes(msgspec.msgpack.encode(check_guide(guide, backend)))


def _limit_memory(more: int) -> None:
    """Let this process take so many bytes more than it has."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    statm = Path("/proc/self/statm")
    has = int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 0
    resource.setrlimit(resource.RLIMIT_AS, (has + more, has + more))
