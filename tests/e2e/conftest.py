"""Real servers on free loopback ports, over checkpoints of a few kilobytes."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import httpx
import pytest

PATIENCE = 90.0
"""Seconds anything here may take on a machine that is busy with something else."""

Write = Callable[..., Path]


@dataclass
class Server:
    """A server process, and everything it said."""

    process: subprocess.Popen[bytes]
    output: Path
    scratch: Path

    @property
    def said(self) -> str:
        return self.output.read_text()

    @property
    def url(self) -> str:
        """Where it serves; waits until it does."""
        self.until(lambda: "Serving on" in self.said)
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
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        assert url.port
        return url.host, url.port

    def until(self, holds: Callable[[], bool]) -> None:
        """Wait for something that must happen while the server lives."""
        deadline = time.monotonic() + PATIENCE
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
        return self.process.wait(PATIENCE)


def children(pid: int) -> list[int]:
    """Living child processes; /proc lists them per thread."""
    tasks = Path(f"/proc/{pid}/task")
    return [int(child) for task in tasks.iterdir() for child in (task / "children").read_text().split()]


def name(pid: int) -> str:
    """What a process calls itself; "" when it is gone."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except FileNotFoundError:
        return ""


@contextmanager
def serving(scratch: Path, *arguments: str) -> Iterator[Server]:
    """A server with these arguments; killed at the end if it still runs."""
    scratch.mkdir(parents=True, exist_ok=True)
    output = scratch.with_suffix(".log")
    command = [sys.executable, "-m", "charonia", "serve", *arguments, "--http-address", "127.0.0.1"]
    command += ["--grpc-address", "127.0.0.1"]
    for flag in ("--http-port", "--grpc-port", "--metrics-port"):
        if not any(argument.startswith(flag) for argument in arguments):
            command += [flag, "0"]
    with output.open("wb") as file:
        environment = os.environ | {"TMPDIR": str(scratch)}
        # A group of its own: a test may signal all of it.
        process = subprocess.Popen(
            command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
        )
    try:
        yield Server(process, output, scratch)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE)


@pytest.fixture
def serve(tmp_path: Path) -> Callable[..., object]:
    """`serve(*arguments)` is a context manager that yields a `Server`."""
    # Short: the path of a unix socket has little room.
    return lambda *arguments: serving(tmp_path / "t", *arguments)


@pytest.fixture(scope="session")
def checkpoint(making: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole checkpoint with random weights."""
    written: Path = making.write_checkpoint(tmp_path_factory.mktemp("tiny") / "tiny")
    return written


@pytest.fixture(scope="session")
def tokenizer_only(making: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the fake executor needs of a checkpoint."""
    directory = tmp_path_factory.mktemp("fake") / "fake"
    directory.mkdir()
    making.write_tokenizer(directory)
    (directory / "config.json").write_text("{}")
    return directory


def write_model(repository: Path, name: str, checkpoint: Path, **parameters: object) -> None:
    """A model directory whose version 1 is a copy of `checkpoint`."""
    shutil.copytree(checkpoint, repository / name / "1")
    lines = [f'name: "{name}"', 'backend: "charonia"']
    for key, value in parameters.items():
        lines.append(f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}')
    (repository / name / "config.pbtxt").write_text("\n".join(lines))


FAKE = {"executor": "fake", "fake_vocab_size": 384}


@pytest.fixture(scope="session")
def repository(tmp_path_factory: pytest.TempPathFactory, checkpoint: Path, tokenizer_only: Path) -> Path:
    """`tiny` computes, `fake` counts, `slow` counts slowly and lets one wait, `broken` cannot be."""
    directory = tmp_path_factory.mktemp("repository")
    write_model(directory, "tiny", checkpoint)
    write_model(directory, "fake", tokenizer_only, **FAKE)
    write_model(
        directory, "slow", tokenizer_only, **FAKE, fake_step_seconds=0.05, max_num_seqs=1, max_queued_requests=1
    )
    write_model(directory, "broken", tokenizer_only, bogus=1)
    return directory


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory, repository: Path) -> Iterator[Server]:
    """One server over `repository` for all tests that leave it as it was."""
    flags = ("--model-repository", str(repository), "--exit-on-error=false")
    with serving(tmp_path_factory.mktemp("s") / "t", *flags) as running:
        yield running
        assert running.stop() == 0, running.said
        assert list(running.scratch.iterdir()) == []


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, root: Path) -> Iterator[Server]:
    """The server that `make serve` starts."""
    models = root / "examples" / "model_repository"
    with serving(tmp_path_factory.mktemp("d") / "t", "--model-repository", str(models)) as running:
        yield running
