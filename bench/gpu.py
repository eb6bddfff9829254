"""The engine on a CUDA device, against what the device allows: its tests, attention, steps, served over HTTP, and
offline beside transformers.

    python -m charonia.bench.gpu [--tests tests/gpu] [--out FOLDER] [--minutes 9] [--resume]

The models have the shapes of Llama-3.1-8B and Llama-3.2-1B, with random weights made on the device. Kernels are timed
in a CUDA graph, out of several layers' caches in turn. Each figure is printed, appended to FOLDER/gpu.jsonl, and stands
in the table of FOLDER/gpu.md as soon as it is measured: whatever ends a run loses nothing. What there is no time for is
left out, and measured by a run that resumes this one; a row that fails takes no other with it, nor does one that never
ends or leaves the device useless, behind which the run goes on in a new process; the last line says what failed.
"""

import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from threading import Timer
from time import perf_counter
from typing import Annotated

import torch
from cyclopts import App, Parameter

from .gpu_bench import GpuBench
from .gpu_engine import SMALL, GpuWork
from .gpu_report import PEAKS, GpuReport, Row, run_tests
from .server_process import exit_on_signals

_TESTS = "tests"
"""What they are called among the rows."""
_TESTS_SECONDS = 240.0
"""The most that tests may take of the time."""

_SLOW, _GRACE = 3.0, 60.0
"""How many times as long as it should take a row may take, and how many seconds more."""

app = App(help=__doc__, help_format="plaintext")


def measure(rows: Sequence[Row], report: GpuReport, ends: float, begin_again: Callable[[str], None]) -> None:
    """Measure every row that there is time for before `ends`, by `perf_counter`. `begin_again`: goes on in another
    process without the row of that name, which never ends, or behind which the device is of no use."""
    for row in rows:
        if perf_counter() + row.seconds > ends:
            report.leave_out(row.name)
            continue
        try:
            with _limited(row, report, begin_again):
                for figure in row.measure():
                    report.add(figure)
            report.finish(row.name)
        except Exception as error:  # a row that fails takes no other with it
            report.fail(row.name, f"{type(error).__name__}: {error}")
            if not _device_works():
                begin_again(row.name)


@contextmanager
def _limited(row: Row, report: GpuReport, begin_again: Callable[[str], None]) -> Iterator[None]:
    most = _SLOW * row.seconds + _GRACE

    def give_up() -> None:
        """In a thread: what waits for a device that hangs hears nothing."""
        report.fail(row.name, f"not done after {most:.0f} s")
        begin_again(row.name)

    timer = Timer(most, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _device_works() -> bool:
    """False behind an access to memory that is not there, for instance, which ends all that a process has there."""
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            torch.ones(1, device="cuda").item()
    except Exception:
        return False
    return True


def remaining(rows: Sequence[Row], done: Collection[str], failed: Collection[str] = ()) -> list[Row]:
    """The rows that are not done, and what these need; those that have failed come last."""
    missing = [row for row in rows if row.name not in done]
    needed = {name for row in missing for name in row.needs}
    wanted = [row for row in rows if row.name not in done or row.name in needed]
    return sorted(wanted, key=lambda row: row.name in failed and row.name not in needed)


def replace_process(minutes: float, tests: Path | None, out: Path, only: Sequence[str], without: Sequence[str]) -> None:
    """Become a run that resumes this one (see `main`). What the process has on the device is gone with its files."""
    command = [sys.executable, "-m", "charonia.bench.gpu", "--resume", "--minutes", f"{max(minutes, 0):.2f}"]
    command += ["--out", str(out), *([] if tests is None else ["--tests", str(tests)])]
    for flag, names in (("--only", only), ("--without", without)):
        command += [flag, *names] if names else []
    sys.stdout.flush()
    os.closerange(3, 4096)
    os.execv(sys.executable, command)


def _about(command: str) -> str:
    packages = [f"Python {sys.version.split()[0]}"]
    for name in ("torch", "triton", "transformers"):
        with suppress(PackageNotFoundError):
            packages.append(f"{name} {version(name)}")
    return f"{date.today()}, {torch.cuda.get_device_name()}, {', '.join(packages)}; `{command}`"


@app.default
def main(
    *,
    tests: Path | None = None,
    out: Path = Path(),
    minutes: float = 9.0,
    only: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (),
    resume: bool = False,
    without: Annotated[tuple[str, ...], Parameter(consume_multiple=True)] = (),
) -> None:
    """Measure, a line each.

    Parameters
    ----------
    tests
        Folder of tests that are run first.
    out
        Folder for gpu.jsonl, which is appended to, gpu.md and the pictures of steps.
    minutes
        How long all of it may take.
    only
        The rows whose name has one of these in it; the peaks are measured anyway.
    resume
        Go on where the run before ended: what is in FOLDER/gpu.jsonl since a run last began anew is not measured again,
        and what failed comes last.
    without
        Rows that are not measured, by their whole names.
    """
    ends = perf_counter() + 60 * minutes
    if not torch.cuda.is_available():
        sys.exit("no CUDA device on this machine, or a torch without CUDA")
    out.mkdir(parents=True, exist_ok=True)
    command = f"python -m charonia.bench.gpu --minutes {minutes:g}" + (f" --tests {tests}" if tests else "")
    report = GpuReport(_about(command), out / "gpu.jsonl", out / "gpu.md", partial(print, flush=True), resume)

    def begin_again(row: str) -> None:
        replace_process((ends - perf_counter()) / 60, tests, out, only, (*without, row))

    is_finished = False
    try:
        with exit_on_signals():
            if tests is not None and _TESTS not in report.done and run_tests(tests, _TESTS_SECONDS, report):
                report.finish(_TESTS)
            invariant = GpuWork(name="8B, batch-invariant,", batch_invariance=True)
            small, other = (GpuBench(work, "cuda", out) for work in (SMALL, invariant))
            rows = GpuBench(GpuWork(), "cuda", out).table(small, other)
            parts = (*PEAKS, *only) if only else ("",)
            wanted = [row for row in rows if any(part in row.name for part in parts) and row.name not in without]
            measure(remaining(wanted, report.done, report.failures), report, ends, begin_again)
            is_finished = True
    finally:
        report.close(is_finished)
    sys.exit(1 if report.failures else 0)


if __name__ == "__main__":
    app()
