"""A process that has imported what a server is made of, and copies itself for each server that tests start.

Imports take two thirds of a server's start. All else of a copy is a server's own: it runs `main` with its arguments, in
its environment, as a child of the process that asked for it.
"""

import atexit
import ctypes
import gc
import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from typing import IO

MODULES = (
    *("cli.app", "cli.plan", "cli.serve", "cli.frontend_servers", "repository.gateway", "telemetry.tracing"),
    *("classic_backends.batching.dispatcher", "engine.client.llm", "extras.batches.runner"),
    *("extras.console.graph_routes", "extras.rollouts.endpoints", "extras.rollouts.shadow"),
)
_SET_CHILD_SUBREAPER = 36
"""Of prctl(2): whether a process below this one whose parent ends becomes a child of this one."""
_MOST_BYTES = 2**20


class CopiedProcess:
    """A copy of the template, which is a child of this process; as `subprocess.Popen`."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or None if it runs."""
        return self._reap(os.WNOHANG)

    def wait(self, timeout: float | None = None) -> int:
        """The exit code; raises `TimeoutExpired` if it runs for so many seconds more."""
        if self.poll() is None:
            end = os.pidfd_open(self.pid)
            try:
                if not select.select([end], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("a copied server", timeout or 0.0)
            finally:
                os.close(end)
        code = self._reap(0)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it runs."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """End it with SIGKILL, if it runs."""
        self.send_signal(9)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode


def copy_process(arguments: Sequence[str], output: IO[bytes], environment: Mapping[str, str]) -> CopiedProcess:
    """`charonia` with these arguments, in a session of its own, which writes all it says into `output`."""
    template, libc = _template(), ctypes.CDLL(None)
    libc.prctl(_SET_CHILD_SUBREAPER, 1)
    try:
        message = json.dumps([list(arguments), dict(environment), os.getcwd()]).encode()
        socket.send_fds(template, [message], [output.fileno()])
        return CopiedProcess(int(template.recv(_MOST_BYTES)))
    finally:
        libc.prctl(_SET_CHILD_SUBREAPER, 0)


@cache
def _template() -> socket.socket:
    """The connection to the template of this process, which ends with it."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        command = [sys.executable, "-P", __file__, str(theirs.fileno())]
        process = subprocess.Popen(command, pass_fds=[theirs.fileno()])
    atexit.register(process.wait)
    atexit.register(ours.close)
    return ours


def _copy_on_demand(requests: socket.socket) -> None:
    """In the template: a copy for each message, until the other end is closed."""
    for module in MODULES:
        import_module(f"charonia.{module}")
    gc.collect()
    gc.freeze()
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, _MOST_BYTES, 1)
        if not message:
            return
        [output] = descriptors
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            # The copy's parent ends at once: then it is a child of the process that asks.
            if copy := os.fork():
                os.write(writer, str(copy).encode())
                os._exit(0)
            for descriptor in (reader, writer, requests.detach()):
                os.close(descriptor)
            _run_server(message, output)
        os.waitpid(child, 0)
        requests.send(os.read(reader, _MOST_BYTES))
        for descriptor in (reader, writer, output):
            os.close(descriptor)


def _run_server(message: bytes, output: int) -> None:
    arguments, environment, directory = json.loads(message)
    os.setsid()
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.close(output)
    os.chdir(directory)
    sys.path.insert(0, directory)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = ["charonia", *arguments]
    import_module("charonia.__main__").main()


if __name__ == "__main__":
    _copy_on_demand(socket.socket(fileno=int(sys.argv[1])))
