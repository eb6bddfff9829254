"""An instance's process, seen from the thread that uses it: spawned, told, heard, and buried.

Knows nothing of models. Used once: a process that is lost is lost, and another one is another link.
"""

import logging
import select
import signal
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

import msgspec

from ...processes.child_process import ChildProcess
from .instance_messages import FromInstance, InstanceLogRecord, ToInstance

log = logging.getLogger(__name__)

_LEAVE_SECONDS = 5.0
"""What a process gets to close its model, before it is killed."""


class ProcessLost(Exception):
    """The process has ended: `ended unexpectedly: <how>`, or `was ended: <why>` where `kill` did it."""


class InstanceProcess:
    """Runs `target(connection, *arguments)` in a process of its own. `send` and `receive` belong to one thread.

    Raises:
        OSError: there can be no process.
    """

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode: Callable[[bytes], FromInstance] = msgspec.msgpack.Decoder(FromInstance).decode
        self._connection, theirs = Pipe()
        self.lost = False
        self._reason = ""
        try:
            self._process = ChildProcess("charonia-model", target, theirs, *arguments)
        except BaseException:
            self._connection.close()
            raise
        finally:
            theirs.close()
        self._waits = select.poll()
        for descriptor in (self._connection.fileno(), self._process.sentinel):
            self._waits.register(descriptor, select.POLLIN)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def sentinel(self) -> int:
        """A descriptor that can be read when the process has ended."""
        return self._process.sentinel

    def send(self, message: ToInstance) -> None:
        """Raises `ProcessLost`."""
        try:
            self._connection.send_bytes(self._encode(message))
        except OSError:
            raise self._loss() from None

    def receive(self) -> FromInstance:
        """The next message; what it wants in the log goes there. Raises `ProcessLost`."""
        while isinstance(message := self._receive(), InstanceLogRecord):
            logging.getLogger(message.logger).log(message.level, "%s", message.text)
        return message

    def kill(self, reason: str) -> None:
        """From any thread; `ProcessLost` says why."""
        self._reason = reason
        self._process.kill()

    def close(self) -> None:
        """Let it end by itself, or else kill it; it is gone afterwards."""
        self._connection.close()
        self._process.close(_LEAVE_SECONDS)

    def _receive(self) -> FromInstance:
        # Processes that the model started may hold the connection open.
        ready = {descriptor for descriptor, _ in self._waits.poll()}
        if self._connection.fileno() not in ready:
            raise self._loss()
        try:
            return self._decode(self._connection.recv_bytes())
        except (EOFError, OSError):
            raise self._loss() from None

    def _loss(self) -> ProcessLost:
        self.lost = True
        how = _exit_reason(self._process.wait(_LEAVE_SECONDS))
        return ProcessLost(f"was ended: {self._reason}" if self._reason else f"ended unexpectedly: {how}")


def _exit_reason(exit_code: int | None) -> str:
    if exit_code is None:
        return "it hung up"
    if exit_code >= 0:
        return f"it exited with {exit_code}"
    try:
        return f"it was ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"it was ended by signal {-exit_code}"
