"""What `make gpu` leaves behind, whenever it ends: a line of JSON for each figure, a table as docs/performance.md has
it, and a last line that says what failed. Also the tests that it runs first."""

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from threading import Timer
from time import perf_counter
from typing import NamedTuple

_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)
"""The line of a test in pytest's summary."""
_PASSED = re.compile(r"^(?:\[gw\d+\] \[ *\d+%\] (?:PASSED|SKIPPED) )?(\S+?::.+?)(?: (?:PASSED|SKIPPED)\b.*)?\s*$")
"""The line of a test that passes or is skipped, in one process and side by side."""
_NO_TESTS = 5
"""How pytest ends where all that it finds is deselected."""
_MOST_WORKERS = 12
"""Each has a context on the device, and most of its time goes to compiling kernels."""


class Figure(NamedTuple):
    """A row of the table: `share` of the bound that `of` names, and the least share that is wanted. `more`: what else
    there is to say of it."""

    name: str
    value: float
    unit: str
    share: float | None = None
    of: str = ""
    bar: float | None = None
    more: str = ""

    @property
    def measured(self) -> str:
        text = f"{self.value:,.4g} {self.unit}" if self.value < 10_000 else f"{self.value:,.0f} {self.unit}"
        if self.share is not None:
            text += f", {self.share:.2f} of {self.of}"
        return f"{text}; {self.more}" if self.more else text

    @property
    def verdict(self) -> str:
        if self.bar is None or self.share is None:
            return ""
        return f"{self.bar:g}: {'met' if self.share >= self.bar else 'missed'}"

    def __str__(self) -> str:
        return f"{self.name}: {self.measured}" + (f" (bar {self.verdict})" if self.verdict else "")


PEAKS = "copy bandwidth", "products"
"""The rows that the shares of all others are of."""


class Row(NamedTuple):
    """Figures that are measured together, which takes about so many `seconds` on an H200."""

    name: str
    seconds: float
    measure: Callable[[], Iterator[Figure]]
    needs: tuple[str, ...] = PEAKS
    """The rows that must be measured before it by the same process."""


class GpuReport:
    """The figures of a run as they come: each is on the disk before the next is measured. `about`: the card, versions
    and the command. `lines`: a file that is appended to; `table`: one that is written anew each time. `resume`: the
    figures of the run before, and of those that it resumed, are this one's, too."""

    def __init__(self, about: str, lines: Path, table: Path, tell: Callable[[str], None], resume: bool = False) -> None:
        self._about = about
        self._lines = lines
        self._table = table
        self._tell = tell
        self._figures: list[Figure] = []
        self.failures: list[str] = []
        self.left_out: list[str] = []
        self._is_finished = False
        self.done: set[str] = set()
        """The rows whose figures are all there."""
        self.tested: list[str] = []
        """The tests that have passed or were skipped."""
        if resume:
            self._resume()
        else:
            self._append({"began": about})
        self._write_table()

    def add(self, figure: Figure) -> None:
        self._keep(figure)
        self._append(figure._asdict())
        self._write_table()
        self._tell(str(figure))

    def fail(self, what: str, why: str) -> None:
        if what not in self.failures:
            self.failures.append(what)
        self._append({"failed": what})
        self._tell(f"failed: {what}: {why}")
        self._write_table()

    def finish(self, row: str) -> None:
        """All figures of the row are there."""
        self._take_as_done(row)
        self._append({"done": row})

    def pass_test(self, name: str) -> None:
        self.tested.append(name)
        self._append({"tested": name})

    def leave_out(self, what: str) -> None:
        """For want of time."""
        self.left_out.append(what)
        self._write_table()

    def close(self, is_finished: bool) -> None:
        self._is_finished = is_finished
        self._write_table()
        self._tell(self.last_line)

    @property
    def last_line(self) -> str:
        text = f"failed: {', '.join(self.failures)}" if self.failures else "nothing failed"
        text += f"; left out for want of time: {', '.join(self.left_out)}" if self.left_out else ""
        return text if self._is_finished else f"{text}; it was stopped before its end"

    def _resume(self) -> None:
        """Read what there is since a run last began anew; a run that was stopped may have left half a line."""
        text = self._lines.read_text() if self._lines.exists() else ""
        if text and not text.endswith("\n"):
            self._lines.write_text(text + "\n")
        for line in text.splitlines():
            with suppress(ValueError):
                content = json.loads(line)
                if "began" in content:
                    self._figures.clear()
                    self.done.clear()
                    self.tested.clear()
                    self.failures.clear()
                elif "tested" in content:
                    self.tested.append(content["tested"])
                elif "done" in content:
                    self._take_as_done(content["done"])
                elif "failed" in content:
                    self.failures = [*dict.fromkeys((*self.failures, content["failed"]))]
                else:
                    self._keep(Figure(**content))

    def _take_as_done(self, row: str) -> None:
        self.done.add(row)
        self.failures = [failed for failed in self.failures if failed != row]

    def _keep(self, figure: Figure) -> None:
        """In place of an earlier one of the same name."""
        names = [earlier.name for earlier in self._figures]
        if figure.name in names:
            self._figures[names.index(figure.name)] = figure
        else:
            self._figures.append(figure)

    def _append(self, content: Mapping[str, object]) -> None:
        with self._lines.open("a") as file:
            file.write(json.dumps(content) + "\n")
            file.flush()
            os.fsync(file.fileno())

    def _write_table(self) -> None:
        rows = (f"| {figure.name} | {figure.verdict} | {figure.measured} |" for figure in self._figures)
        lines = (self._about, "", "| row | bar | measured |", "|---|---|---|", *rows, "", self.last_line, "")
        beside = self._table.with_name(f".{self._table.name}.new")
        beside.write_text("\n".join(lines))
        beside.replace(self._table)


def run_tests(folder: Path, seconds: float, report: GpuReport) -> bool:
    """Run the tests in `folder` that have not passed, side by side where pytest can, for so many seconds at most; each
    one that fails is a failure of the report. False: some had no time."""
    root = folder.resolve().parents[1]  # where tests import from others; the folder's own pytest.ini would be it
    command = [sys.executable, "-m", "pytest", "-v", "-rfEs", f"--rootdir={root}", str(folder.resolve())]
    command += [f"--deselect={name}" for name in report.tested]
    if importlib.util.find_spec("xdist") is not None:
        command += ["--numprocesses", str(min(_MOST_WORKERS, os.cpu_count() or 1)), "--dist", "loadfile"]
    what = f"tests of {folder}"
    began = perf_counter()
    said = list[str]()
    with subprocess.Popen(
        command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as tests:
        timer = Timer(seconds, _end, (tests,))
        timer.start()
        try:
            for line in tests.stdout or ():
                said.append(line)
                if ("PASSED" in line or "SKIPPED" in line) and (test := _PASSED.match(line)):
                    report.pass_test(test[1])
                else:
                    print(line, end="", flush=True)
            tests.wait()
        finally:
            timer.cancel()
            _end(tests)
    output = "".join(said)
    failed = [*dict.fromkeys(_FAILED.findall(output))]
    for name in failed:
        report.fail(name, "see above")
    if tests.returncode < 0:
        report.fail(what, f"not done after {seconds:.0f} s")
    elif tests.returncode and not failed and tests.returncode != _NO_TESTS:
        report.fail(what, f"pytest ended with {tests.returncode}")
    summary = next((line.strip("= \n") for line in reversed(said) if " in " in line), "no summary")
    more = summary.partition(" in ")[0] if tests.returncode >= 0 else f"{len(report.tested)} passed or skipped"
    report.add(Figure(what, perf_counter() - began, "s", more=more))
    return tests.returncode >= 0


def _end(tests: "subprocess.Popen[str]") -> None:
    """Its workers, too."""
    with suppress(ProcessLookupError):
        os.killpg(tests.pid, signal.SIGKILL)
