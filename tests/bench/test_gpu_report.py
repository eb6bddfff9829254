"""What `make gpu` leaves behind when it ends, and when it does not."""

import importlib.util
import json
from pathlib import Path

import pytest

from charonia.bench.gpu import remaining
from charonia.bench.gpu_report import Figure, GpuReport, Row, run_tests

TESTS = """
import time
import pytest
def test_right(): pass
def test_wrong(): assert False
@pytest.mark.skip(reason="no device")
def test_skipped(): pass
"""


def report_in(directory: Path, told: list[str]) -> GpuReport:
    return GpuReport("a card", directory / "gpu.jsonl", directory / "gpu.md", told.append)


def test_a_figure_says_whether_its_bar_is_met() -> None:
    assert str(Figure("prefill", 512, "ms", 0.61, "peak", 0.6)) == "prefill: 512 ms, 0.61 of peak (bar 0.6: met)"
    assert str(Figure("tokens", 12345.6, "tokens/s", more="all")) == "tokens: 12,346 tokens/s; all"


def test_what_was_measured_is_there_at_every_moment(tmp_path: Path) -> None:
    """A run that is stopped leaves a table that says so; the next one appends its lines."""
    told: list[str] = []
    report = report_in(tmp_path, told)
    assert (tmp_path / "gpu.md").read_text().endswith("\n\nnothing failed; it was stopped before its end\n")
    report.add(Figure("first", 1.5, "ms", 0.5, "peak", 0.6))
    report.fail("second", "KeyError: 'x'")
    lines = (tmp_path / "gpu.md").read_text().splitlines()
    assert lines == [
        "a card",
        "",
        "| row | bar | measured |",
        "|---|---|---|",
        "| first | 0.6: missed | 1.5 ms, 0.50 of peak |",
        "",
        "failed: second; it was stopped before its end",
    ]
    report.close(is_finished=True)
    assert told[-1] == "failed: second"
    report_in(tmp_path, told).add(Figure("third", 2.0, "ms"))
    lines = [json.loads(line) for line in (tmp_path / "gpu.jsonl").read_text().splitlines()]
    assert [line["name"] for line in lines if "name" in line] == ["first", "third"]
    assert [file.name for file in tmp_path.iterdir() if file.name.startswith(".")] == []


def test_a_run_that_resumes_another_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    """Not where one before it was: what a row that was not done had measured is measured again."""
    report_in(tmp_path, []).add(Figure("of an earlier run", 1, "ms"))
    stopped = report_in(tmp_path, [])
    stopped.add(Figure("first", 1, "ms"))
    stopped.finish("one")
    stopped.add(Figure("second", 2, "ms"))
    for what in ("a test", "two", "three"):
        stopped.fail(what, "no memory")
    with (tmp_path / "gpu.jsonl").open("a") as file:
        file.write('{"name": "ha')
    told: list[str] = []
    resumed = GpuReport("a card", tmp_path / "gpu.jsonl", tmp_path / "gpu.md", told.append, resume=True)
    rows = [Row(name, 1, iter) for name in ("peak", "one", "two", "three")]
    rows[1:] = [row._replace(needs=("peak",)) for row in rows[1:]]
    assert [row.name for row in remaining(rows, {*resumed.done, "peak"})] == ["peak", "two", "three"]
    assert [row.name for row in remaining(rows, {"one"}, {"two", "peak"})] == ["peak", "three", "two"]
    assert remaining(rows, {row.name for row in rows}) == []
    resumed.add(Figure("second", 3, "ms"))
    resumed.finish("two")
    resumed.close(is_finished=True)
    assert told[-1] == "failed: a test, three"
    table = (tmp_path / "gpu.md").read_text().splitlines()
    assert table[4:-2] == ["| first |  | 1 ms |", "| second |  | 3 ms |"]
    assert GpuReport("a card", tmp_path / "gpu.jsonl", tmp_path / "gpu.md", told.append, resume=True).done == {
        "one",
        "two",
    }
    assert (tmp_path / "gpu.md").read_text().splitlines()[:-1] == table[:-1], "a line behind half a line is not lost"


def test_tests_that_fail_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)  # no xdist
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:asyncio\n")
    (tmp_path / "test_it.py").write_text(TESTS)
    told: list[str] = []
    report = report_in(tmp_path, told)
    assert run_tests(tmp_path, 60.0, report)
    [failed] = report.failures
    assert [name.rpartition("::")[2] for name in report.tested] == ["test_right", "test_skipped"]
    assert failed.endswith("test_it.py::test_wrong")
    assert "; 1 failed, 1 passed, 1 skipped" in told[-1]
    assert "no device" in capfd.readouterr().out


def test_tests_that_take_too_long_are_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    report = report_in(tmp_path, [])
    assert not run_tests(tmp_path, 0.0, report)
    assert report.failures == [f"tests of {tmp_path}"]


QUICK = """
import pathlib
import pytest
@pytest.mark.parametrize("number", ["number 1", "number 2"])
def test_it(number): pathlib.Path(__file__).with_name(number).touch()
"""
KILLING = """
import os, pathlib, signal, time
def test_long():
    while not pathlib.Path(__file__).with_name("number 2").exists():
        time.sleep(0.1)
    time.sleep(1)
    os.killpg(0, signal.SIGKILL)
"""


@pytest.mark.parametrize("side_by_side", [False, True])
def test_tests_that_had_no_time_are_run_when_a_run_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, side_by_side: bool
) -> None:
    """And none that has passed. The first run ends as it does when its time is over."""
    if side_by_side:
        pytest.importorskip("xdist")
    else:
        monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -p no:asyncio\n")
    (tmp_path / "test_it.py").write_text(QUICK)
    (tmp_path / "test_long.py").write_text(KILLING)
    assert not run_tests(tmp_path, 60.0, report_in(tmp_path, []))
    (tmp_path / "test_long.py").write_text("def test_long(): pass\n")
    told = list[str]()
    report = GpuReport("a card", tmp_path / "gpu.jsonl", tmp_path / "gpu.md", told.append, resume=True)
    assert len(report.tested) == 2
    for more in ("1 passed, 2 deselected", "3 deselected"):
        assert run_tests(tmp_path, 60.0, report)
        assert told[-1].endswith(f"; {more}") or side_by_side
        assert len(report.tested) == 3
