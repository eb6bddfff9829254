"""What each test takes of the processor: a plugin of tests/conftest.py, for `--cpu-seconds=FILE`: pytest takes
a file behind a blank for one of tests.

Processes below this one count, too, while they run: what a server takes belongs to the test that asks it.
"""

import json
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from resource import RUSAGE_CHILDREN, RUSAGE_SELF, getrusage
from typing import Any

import pytest

_TICK = os.sysconf("SC_CLK_TCK")
_MOST = 40


class CpuSeconds:
    """Writes a line [seconds, test] for each test, in whichever worker it runs, and says in the end what files took."""

    def __init__(self, file: Path) -> None:
        self._file = file
        file.write_text("")

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        before = _spent()
        try:
            return (yield)
        finally:
            with self._file.open("a") as file:
                file.write(json.dumps([round(_spent() - before, 3), item.nodeid]) + "\n")

    def pytest_terminal_summary(self, terminalreporter: Any) -> None:
        files: Counter[str] = Counter()
        for seconds, test in map(json.loads, self._file.read_text().splitlines()):
            files[test.partition("::")[0]] += seconds
        terminalreporter.section(f"{files.total():.0f} s of CPU")
        for name, seconds in files.most_common(_MOST):
            terminalreporter.line(f"{seconds:7.1f} {name}")


def _spent() -> float:
    """By this process and all below it so far."""
    waited = sum(usage.ru_utime + usage.ru_stime for usage in map(getrusage, (RUSAGE_SELF, RUSAGE_CHILDREN)))
    return waited + _running_below(os.getpid())


def _running_below(pid: int) -> float:
    total = 0.0
    with suppress(OSError):  # it may end meanwhile
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (task / "children").read_text().split()):
                with suppress(OSError):
                    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
                    total += sum(map(int, fields[11:15])) / _TICK  # with those it has waited for
                total += _running_below(child)
    return total
