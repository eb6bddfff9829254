"""A backend that does in its process what an input tells it; imported there only."""

import logging
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from charonia.core.errors import InvalidArgument
from charonia.core.model import ModelConfig
from charonia.core.runtime import Arrays, InstancePlacement, RawConfig, RuntimeTraits

log = logging.getLogger("charonia.subject")


class Subject:
    traits = RuntimeTraits(ragged=True)

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def execute(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        do = inputs["DO"].ravel()[0].decode() if "DO" in inputs else "echo"
        yield from getattr(self, do)({name: array for name, array in inputs.items() if name != "DO"}, wanted)

    def close(self) -> None:
        (self._directory / "closed").touch()

    def echo(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        yield {name: inputs[name] for name in wanted}

    def process(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        yield {"Y": np.array([[os.getpid(), threading.current_thread() is threading.main_thread()]], np.int64)}

    def shares(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        spins = int(os.environ.get("GOMP_SPINCOUNT", "-1"))
        yield {"Y": np.array([[os.nice(0), spins, os.sched_getscheduler(0)]], np.int64)}

    def write(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        inputs["X"][...] = 0  # type: ignore[index]
        yield {}

    def text(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        yield {"Y": np.array(["no bytes"], object)}

    def refuse(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        raise InvalidArgument("not that", field="X")
        yield {}

    def fail(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        raise ValueError("that hurts")
        yield {}

    def leave(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        raise SystemExit(3)
        yield {}

    def tell(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        log.warning("look %s", "here")
        yield {}

    def twice(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        yield {}
        yield {}

    def exit(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        os._exit(7)
        yield {}

    def crash(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        os.kill(os.getpid(), signal.SIGSEGV)
        yield {}

    def hang(self, inputs: Arrays, wanted: Sequence[str]) -> Iterator[Arrays]:
        (self._directory / "hangs").touch()
        threading.Event().wait()
        yield {}


class SubjectLoader:
    """A file `fails` fails the load, `exits` ends it; a pipe `waits` holds it up until it is written to, and closed."""

    by_request = False

    def load(
        self, directory: Path, config: ModelConfig, place: InstancePlacement, parameters: Mapping[str, str]
    ) -> Subject:
        if (directory / "exits").exists():
            os._exit(9)
        if (directory / "waits").exists():
            (directory / "waits").read_bytes()
        if (directory / "fails").exists():
            raise InvalidArgument("no weights", field="input")
        with (directory / "loads").open("a") as file:
            file.write(f"{os.getpid()} {sorted(parameters.items())}\n")
        return Subject(directory)

    def complete(self, directory: Path, raw: RawConfig, parameters: Mapping[str, str]) -> dict[str, Any]:
        if (directory / "fails").exists():
            raise InvalidArgument("no weights", field="input")
        return {**raw, "max_batch_size": os.getpid(), "parameters": dict(parameters)}


SUBJECT = SubjectLoader()
