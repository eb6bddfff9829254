"""A process that answers calls into a library within limits of time and memory. A call that exceeds them ends the
process, and nothing else."""

import os
import resource
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from .child_process import describe_exit, python_child
from .host import LAST_NICENESS, PATIENT_NICENESS, computing_seconds, lower_process_priority

_START_SECONDS = 60.0
_IDLE_PATIENCE = 10.0
"""So many times as long may take a start that has only what nobody else wants."""
_LAST_WORDS = 1.0
"""Seconds that a process has to end after it closed its connection."""

Answer: TypeAlias = Callable[[bytes], bytes]
"""Computes the answer to one call, in the process."""


class CallLimits(NamedTuple):
    """The limits of one call: seconds, and bytes of memory beyond those of the started process. With a `patience` above
    1 only seconds count for which the process has a processor; so many times as long may pass."""

    seconds: float = 5.0
    memory: int = 512 << 20
    patience: float = 1.0


class TimeLimitExceeded(Exception):
    """A call took longer than allowed; the process has ended."""


class CallLost(Exception):
    """The process did not start, or ended during a call. The message says how."""


class LimitedProcess:
    """A process, `name` in `ps`, that answers calls one at a time by the function that `make(*arguments)` returns
    there. It has the `inherited` descriptors by the same numbers. For one thread at a time. The constructor does not
    wait for its start. With LAST_NICENESS for its work a process that `starts_in_haste` has PATIENT_NICENESS for its
    imports, so that the start has an end; another one has LAST_NICENESS for these, too, and ten times as long.

    Raises:
        CallLost: it cannot be started.
    """

    def __init__(
        self,
        name: str,
        make: Callable[..., Answer],
        *arguments: Any,
        inherited: Sequence[int] = (),
        niceness: int = PATIENT_NICENESS,
        starts_in_haste: bool = True,
    ) -> None:
        self._connection, theirs = Pipe()
        try:
            with theirs:  # only the process has it then, so it closes when that ends
                self._process = python_child(name, _serve, make, arguments, theirs, niceness, inherited=inherited)
            if niceness == LAST_NICENESS:
                lower_process_priority(PATIENT_NICENESS if starts_in_haste else niceness, self._process.pid)
        except OSError as error:
            self._connection.close()
            raise CallLost(str(error)) from error
        self.kill = self._process.kill
        """Ends the process, from any thread; a call then raises `CallLost`."""
        self.alive = True
        self._ready = False
        self._deadline = time.monotonic() + _START_SECONDS * (1.0 if starts_in_haste else _IDLE_PATIENCE)

    def wait_until_ready(self, seconds: float) -> bool:
        """Whether it started within `seconds`. Raises `CallLost` if it ended instead, or did not start within a
        minute, or ten without haste."""
        if self._ready:
            return True
        ready = self._receive(min(seconds, self._deadline - time.monotonic()))
        if ready is None and time.monotonic() < self._deadline:
            return False
        if not ready:
            raise CallLost(f"it did not start: {describe_exit(self.close(0.0 if ready is None else _LAST_WORDS))}")
        self._ready = True
        return True

    def call(self, message: bytes, limits: CallLimits) -> bytes:
        """The answer to a message, once the process has started. An error ends the process.

        Raises:
            TimeLimitExceeded: there was no answer in time.
            CallLost: the process ended instead.
        """
        while not self.wait_until_ready(_START_SECONDS):
            pass
        try:
            self._connection.send_bytes(limits.memory.to_bytes(8, "little") + message)
            answer = self._receive_answer(limits)
        except OSError:
            answer = b""
        if answer:
            return answer
        ended = describe_exit(self.close(0.0 if answer is None else _LAST_WORDS))
        if answer is None:
            raise TimeLimitExceeded(f"more than {limits.seconds:g} s")
        raise CallLost(ended)

    def _receive_answer(self, limits: CallLimits) -> bytes | None:
        """As `_receive`, within the limits."""
        deadline = time.monotonic() + limits.seconds * limits.patience
        computed, left = computing_seconds(self._process.pid), limits.seconds
        answer = self._receive(left)
        while answer is None and (seconds := computing_seconds(self._process.pid)) is not None:
            left = min(limits.seconds - seconds + (computed or 0.0), deadline - time.monotonic())
            if left <= 0:
                break
            answer = self._receive(left)
        return answer

    def _receive(self, seconds: float) -> bytes | None:
        """The next message; None if none came in time, empty if the process has ended."""
        try:
            return self._connection.recv_bytes() if self._connection.poll(max(seconds, 0.0)) else None
        except EOFError:
            return b""

    def close(self, timeout: float = 0.0) -> int:
        """Wait `timeout` seconds for the end, then kill the process; return its exit code."""
        self.alive = False
        self._connection.close()
        return self._process.close(timeout)


def _serve(make: Callable[..., Answer], arguments: tuple[Any, ...], connection: Connection, niceness: int) -> None:
    answer = make(*arguments)
    lower_process_priority(niceness)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    own = _address_space()
    connection.send_bytes(b"ready")
    with open(os.devnull, "w") as nothing:  # libraries report crashes, which clients could cause without end
        os.dup2(nothing.fileno(), 2)
    with suppress(EOFError):
        while True:
            message = connection.recv_bytes()
            most = own + int.from_bytes(message[:8], "little")
            resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
            connection.send_bytes(answer(message[8:]))


def _address_space() -> int:
    """Bytes that this process has mapped; 0 if the system does not tell."""
    statm = Path("/proc/self/statm")
    return int(statm.read_text().split()[0]) * resource.getpagesize() if statm.exists() else 0
