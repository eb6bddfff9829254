"""From `charonia serve` to ready: `python -m charonia.bench.server_start CHECKPOINT [--copies 13] [-- FLAGS]`.

Says when its port answers, what the server says of its phases, the processor time that its processes had by then, and
with `--imports` which modules cost most to import. The disk is warm from the second run on.
"""

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, NamedTuple

from cyclopts import App, Parameter
from rich.console import Console

from .server_process import cpu_seconds, own_server

_IMPORT = re.compile(r"import time:\s+(\d+) \|\s+(\d+) \| ( *)(\S+)")
"""self and cumulative microseconds, two spaces for each level, module; as `-X importtime` writes it."""

app = App(name="python -m charonia.bench.server_start", help=__doc__)


class ServerStart(NamedTuple):
    """Seconds until its port answers and until it is ready, processor seconds of the frontend and of engine cores, and
    what the server said."""

    listening: float
    seconds: float
    frontend: float
    engine: float
    said: str


class ModuleImport(NamedTuple):
    """Milliseconds, those of what it imports included."""

    milliseconds: float
    depth: int
    module: str


def start(*what: str) -> ServerStart:
    """Serve `what`, arguments of `charonia serve`, until it is ready."""
    began = time.perf_counter()
    times: list[float] = []
    with own_server(*what, on_open=lambda: times.append(time.perf_counter() - began)) as place:
        seconds = time.perf_counter() - began
        spent = cpu_seconds(place.pid)
        said = place.log.read_text() if place.log else ""
    return ServerStart(times[0], seconds, spent.frontend if spent else 0.0, spent.engine if spent else 0.0, said)


def write_copies(root: Path, checkpoint: Path, copies: int) -> Path:
    """Write a repository of `copies` models that share one checkpoint."""
    for number in range(copies):
        model = root / f"copy-{number:02}"
        model.mkdir(parents=True)
        (model / "config.pbtxt").write_text('backend: "charonia"')
        (model / "1").symlink_to(checkpoint.resolve())
    return root


def imports(said: str, least: float = 20.0) -> list[ModuleImport]:
    """Modules that took `least` milliseconds or more, in the order in which they were imported."""
    matches = (_IMPORT.match(line) for line in said.splitlines())
    modules = (ModuleImport(int(match[2]) / 1e3, len(match[3]) // 2, match[4]) for match in matches if match)
    return [module for module in modules if module.milliseconds >= least]


@app.default
def main(
    checkpoint: str,
    *flags: Annotated[str, Parameter(allow_leading_hyphen=True)],
    runs: int = 3,
    copies: int = 1,
    imports_too: bool = False,
) -> None:
    """Print each run.

    Parameters
    ----------
    checkpoint
        What to serve.
    flags
        Further flags of `charonia serve`.
    runs
        How often.
    copies
        Serve a repository of so many models, each of which is the checkpoint.
    imports_too
        Then once more, to tell what imports cost.
    """
    console = Console(highlight=False, markup=False, soft_wrap=True)
    with TemporaryDirectory() as scratch:
        what = checkpoint if copies == 1 else str(write_copies(Path(scratch), Path(checkpoint), copies))
        for run in range(runs):
            one = start(what, *flags)
            console.print(
                f"run {run}: its port answers after {one.listening:.2f} s, ready after {one.seconds:.2f} s; processor"
                f" time {one.frontend:.2f} s in the frontend, {one.engine:.2f} s in engine cores"
            )
            console.print("".join(f"    {line}\n" for line in one.said.splitlines()), end="")
        if imports_too:
            with _timed_imports():
                for imported in imports(start(what, *flags).said):
                    console.print(f"{imported.milliseconds:8.0f} ms {'  ' * imported.depth}{imported.module}")


@contextmanager
def _timed_imports() -> Iterator[None]:
    os.environ["PYTHONPROFILEIMPORTTIME"] = "1"
    try:
        yield
    finally:
        del os.environ["PYTHONPROFILEIMPORTTIME"]


if __name__ == "__main__":
    app()
