"""Whoever takes part in a comparison: a process of its own, started, asked, and stopped while it is not its turn."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

from ..core.errors import InvalidArgument, Unavailable
from .peer_runner import PeerSetup
from .roofline import Precision

OURS = "charonia"
PEERS: Mapping[str, Sequence[Precision]] = {
    "transformers": ("bf16", "fp16", "fp32"),
    "openvino": ("bf16", "int8", "int4"),
    "llamacpp": ("bf16", "fp16", "fp32", "int8", "int4"),
    "vllm": ("bf16", "fp32"),
}
"""Those we know how to run, and what they compute with."""

_SECONDS = 1800.0
"""An answer may take this long, the first start with its export included."""
_TAIL = 1500


class PeerSpec(NamedTuple):
    """A contender that is asked for: `python` is the interpreter that has it."""

    name: str
    precision: Precision
    python: Path

    @property
    def label(self) -> str:
        return f"{self.name} {self.precision}"


class GenerationTime(NamedTuple):
    """New tokens of each prompt, and the seconds that all took."""

    tokens: Sequence[Sequence[int]]
    seconds: float

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return sum(map(len, self.tokens)) / self.seconds


def parse_peer_specs(precisions: Sequence[Precision], peers: Sequence[str]) -> list[PeerSpec]:
    """Ourselves in every precision, each followed by the peers (NAME or NAME=PYTHON) that compute with it.

    Raises:
        InvalidArgument: a peer that we do not know, or whose interpreter is not there.
    """
    named = [_peer(peer) for peer in peers]
    return [
        entry
        for precision in precisions
        for entry in (
            PeerSpec(OURS, precision, Path(sys.executable)),
            *(PeerSpec(name, precision, python) for name, python in named if precision in PEERS[name]),
        )
    ]


def _peer(text: str) -> tuple[str, Path]:
    name, _, python = text.partition("=")
    path = Path(python or sys.executable)
    if name not in PEERS:
        raise InvalidArgument(f"peer {name!r} is unknown: {', '.join(PEERS)} are not")
    if not path.is_file():
        raise InvalidArgument(f"peer {name}: there is no interpreter {path}")
    return name, path


class PeerProcess:
    """A running contender. It is stopped (SIGSTOP) between its turns, so that its idle work slows no other."""

    def __init__(self, entry: PeerSpec, setup: PeerSetup) -> None:
        """Start it; returns when it stands.

        Raises:
            Unavailable: it cannot; the message holds its last words.
        """
        self.spec = entry
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed in close()
        threads = {"OMP_NUM_THREADS": str(setup.threads)}
        # A group of its own, to be stopped as one; of our session, so that it does not outlive us.
        self._process = subprocess.Popen(
            [*_command(entry), json.dumps(asdict(setup))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            env=os.environ | threads,
            process_group=0,
        )
        try:
            self.about = str(self._hear()["about"])
        except BaseException:
            self.close()
            raise
        self._signal(signal.SIGSTOP)

    def generate(self, prompts: Sequence[Sequence[int]], new: int) -> GenerationTime:
        """Continue all prompts, submitted at once, by `new` tokens each.

        Raises:
            Unavailable: it failed, or made another number of tokens of a prompt.
        """
        self._signal(signal.SIGCONT)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"prompts": prompts, "new": new}).encode() + b"\n")
        self._process.stdin.flush()
        answer = self._hear()
        self._signal(signal.SIGSTOP)
        spent = GenerationTime(answer["tokens"], answer["seconds"])
        if (lengths := [len(made) for made in spent.tokens]) != [new] * len(prompts):
            raise Unavailable(f"{self.spec.label} made {lengths} tokens of {len(prompts)} prompts, not {new} of each")
        return spent

    def close(self) -> None:
        """End it, by its own group."""
        if self._process.poll() is None:
            self._signal(signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()
        self._said.close()

    def __enter__(self) -> "PeerProcess":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _hear(self) -> dict[str, Any]:
        output = self._process.stdout
        assert output is not None
        ready, _, _ = select.select([output], [], [], _SECONDS)
        line = output.readline() if ready else b""
        answer: dict[str, Any] = json.loads(line) if line else {"error": f"no answer\n{self._last_words()}"}
        if "error" in answer:
            raise Unavailable(f"{self.spec.label}: {answer['error']}")
        return answer

    def _last_words(self) -> str:
        size = self._said.seek(0, os.SEEK_END)
        self._said.seek(max(0, size - _TAIL))
        return self._said.read().decode(errors="replace")

    def _signal(self, number: signal.Signals) -> None:
        os.killpg(self._process.pid, number)


def _command(entry: PeerSpec) -> list[str]:
    if entry.name == OURS:
        return [str(entry.python), "-m", f"{__package__}.peer_runner", entry.name]
    # Without charonia there, and without this folder's names in the way of the peer's imports.
    return [str(entry.python), "-P", str(Path(__file__).with_name("peer_runner.py")), entry.name]
