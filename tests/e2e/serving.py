"""A real server on free loopback ports, in a process of its own."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx

if TYPE_CHECKING:
    from tests.e2e.server_template import CopiedProcess

TIMEOUT = 90.0
"""Seconds anything here may take on a machine that is busy with something else."""


@dataclass
class Server:
    """A server process, and everything it said."""

    process: "subprocess.Popen[bytes] | CopiedProcess"
    output: Path
    scratch: Path
    arguments: Sequence[str]

    @property
    def said(self) -> str:
        return self.output.read_text()

    @property
    def url(self) -> str:
        """Where it serves; waits until it does."""
        self.until(lambda: re.search(r"Serving on \S+\n", self.said) is not None)
        found = re.search(r"Serving on (\S+)", self.said)
        assert found
        return found[1]

    @property
    def metrics_url(self) -> str:
        """Where it serves metrics; waits until it serves."""
        found = re.search(r"Metrics on (\S+)", self.said if self.url else "")
        assert found
        return found[1]

    @property
    def grpc_address(self) -> str:
        """Where it serves gRPC; waits until it does."""
        found = re.search(r"gRPC on (\S+)", self.said if self.url else "")
        assert found
        return found[1]

    @property
    def http_address(self) -> str:
        """Where it serves HTTP, as tritonclient wants it; waits until it does."""
        return self.url.removeprefix("http://")

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        assert url.port
        return url.host, url.port

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something that must happen while the server lives."""
        deadline = time.monotonic() + TIMEOUT
        while not holds():
            assert self.process.poll() is None, f"the server ended:\n{self.said}"
            assert time.monotonic() < deadline, f"it did not happen:\n{self.said}"
            time.sleep(0.02)

    def status(self, path: str) -> int:
        return httpx.get(self.url + path).status_code

    def cores(self) -> list[int]:
        """The engine core processes of this server."""
        return [pid for pid in children(self.process.pid) if name(pid) == "charonia-core"]

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and return the exit code."""
        self.process.send_signal(number)
        return self.process.wait(TIMEOUT)


def children(pid: int) -> list[int]:
    """Living child processes; /proc lists them per thread."""
    listed: list[str] = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):  # a thread that ended meanwhile has none
            listed += (task / "children").read_text().split()
    return [int(child) for child in listed]


def name(pid: int) -> str:
    """What a process calls itself; "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def on_loopback(arguments: Sequence[str]) -> list[str]:
    """What is to follow these arguments: all on 127.0.0.1, at ports that are free unless they name one."""
    flags = ["--http-address", "127.0.0.1", "--grpc-address", "127.0.0.1"]
    for flag in ("--http-port", "--grpc-port", "--metrics-port"):
        if not any(argument.startswith(flag) for argument in arguments):
            flags += [flag, "0"]
    return flags


def _of_interpreter(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that count when a process begins and not later."""
    return {name: value for name, value in environment.items() if name.startswith(("PYTHON", "LD_", "MALLOC_"))}


OF_INTERPRETER = _of_interpreter(os.environ)


@contextmanager
def serving(
    scratch: Path,
    *arguments: str,
    python: str = sys.executable,
    variables: Mapping[str, str] = {},
    started: bool = False,
) -> Iterator[Server]:
    """A server with these arguments, and more variables of its environment; killed at the end if it still runs. It is a
    copy of a process that has imported a server, unless it is `started` as users start one, or its interpreter differs
    from ours."""
    scratch.mkdir(parents=True, exist_ok=True)
    output = scratch.with_suffix(".log")
    command = ["serve", *arguments, *on_loopback(arguments)]
    environment = os.environ | {"TMPDIR": str(scratch)} | variables
    process: subprocess.Popen[bytes] | CopiedProcess
    with output.open("wb") as file:
        started |= python != sys.executable or _of_interpreter(environment) != OF_INTERPRETER
        if not started:
            from tests.e2e.server_template import copies, copy_process

            started = not copies("servers", environment)
        if started:
            # A group of its own: a test may signal all of it.
            process = subprocess.Popen(
                [python, "-m", "charonia", *command],
                stdout=file,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        else:
            process = copy_process(command, file, environment)
    try:
        yield Server(process, output, scratch, command)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
        process.wait(TIMEOUT)


@contextmanager
def served_well(scratch: Path, *arguments: str, started: bool = False) -> Iterator[Server]:
    """The same; in the end it stops when it is asked to, and nothing went wrong in it."""
    with serving(scratch, *arguments, started=started) as server:
        yield server
        assert server.stop() == 0, server.said
        assert "Traceback" not in server.said
