"""The server's end of an isolated instance's process: starts it, sends and receives its messages, notices its end.

Used by the instance's thread. Knows nothing of models. A process that is lost is replaced by a new `InstanceProcess`.
"""

import select
import signal
from collections.abc import Callable
from multiprocessing import Pipe
from typing import Any

import msgspec

from ...processes.child_process import python_child
from ...processes.log_forwarding import LogRecordMessage
from .instance_messages import FromInstance, ToInstance

_LEAVE_SECONDS = 5.0
"""How long a process may take to close its model, before it is killed."""


class ProcessLost(Exception):
    """The process has ended: `ended unexpectedly: <how>`, or `was ended: <why>` where `kill` did it."""


class InstanceProcess:
    """Runs `target(connection, *arguments)` in a child process. `send` and `receive` belong to one thread.

    `pid`; `sentinel`: a descriptor that becomes readable when the process has ended; `lost`: its end was noticed.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, target: Callable[..., None], *arguments: Any) -> None:
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder[FromInstance](FromInstance).decode
        self._connection, theirs = Pipe()
        self.lost = False
        self._kill_reason = ""
        try:
            self._process = python_child("charonia-model", target, theirs, *arguments)
        except BaseException:
            self._connection.close()
            raise
        finally:
            theirs.close()
        self.pid, self.sentinel = self._process.pid, self._process.sentinel
        self._poll = select.poll()
        for descriptor in (self._connection.fileno(), self.sentinel):
            self._poll.register(descriptor, select.POLLIN)

    def send(self, message: ToInstance) -> None:
        """Raises `ProcessLost`."""
        try:
            self._connection.send_bytes(self._encode(message))
        except OSError:
            raise self._loss() from None

    def receive(self) -> FromInstance:
        """The next message; records of the process's log go to ours. Raises `ProcessLost`."""
        while True:
            # Processes that the model started may hold the connection open: its end alone would not be noticed.
            ready = {descriptor for descriptor, _ in self._poll.poll()}
            if self._connection.fileno() not in ready:
                raise self._loss()
            try:
                message: FromInstance = self._decode(self._connection.recv_bytes())
            except (EOFError, OSError):
                raise self._loss() from None
            if not isinstance(message, LogRecordMessage):
                return message
            message.log_here()

    def kill(self, reason: str) -> None:
        """Kill the process, from any thread; `ProcessLost` tells the reason."""
        self._kill_reason = reason
        self._process.kill()

    def close(self) -> None:
        """Let the process end by itself, or else kill it; it is gone afterwards."""
        self._connection.close()
        self._process.close(_LEAVE_SECONDS)

    def _loss(self) -> ProcessLost:
        self.lost = True
        exit_code = self._process.wait(_LEAVE_SECONDS)
        if self._kill_reason:
            return ProcessLost(f"was ended: {self._kill_reason}")
        if exit_code is None:
            return ProcessLost("ended unexpectedly: it hung up")
        if exit_code >= 0:
            return ProcessLost(f"ended unexpectedly: it exited with {exit_code}")
        try:
            name = signal.Signals(-exit_code).name
        except ValueError:
            name = f"signal {-exit_code}"
        return ProcessLost(f"ended unexpectedly: it was ended by {name}")
