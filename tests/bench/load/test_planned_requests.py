"""Arrivals, and traces."""

from pathlib import Path

import numpy as np
import pytest

from charonia.bench.load.planned_requests import (
    PlannedRequest,
    draw_arrivals,
    due_within,
    read_trace,
    uniform_jobs,
    write_trace,
)
from charonia.core.errors import InvalidArgument

TRACE = "arrived_at,num_prefill_tokens,num_decode_tokens\n10.0,300,40\n11.5,20,5\n14.0,7,1\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def test_seeds_reproduce_arrivals() -> None:
    assert draw_arrivals(3.0, 7, 50) == draw_arrivals(3.0, 7, 50)
    assert draw_arrivals(3.0, 7, 50) != draw_arrivals(3.0, 8, 50)


def test_arrivals_have_their_rate_and_no_memory() -> None:
    times = draw_arrivals(4.0, 1, 20_000)
    gaps = np.diff(times)
    assert np.mean(gaps) == pytest.approx(0.25, rel=0.05)
    assert np.std(gaps) == pytest.approx(0.25, rel=0.05)
    assert min(gaps) > 0


def test_a_trace_begins_at_once_and_plays_faster(trace: Path) -> None:
    assert read_trace(trace) == [
        PlannedRequest(0, 0.0, 300, 40),
        PlannedRequest(1, 1.5, 20, 5),
        PlannedRequest(2, 4.0, 7, 1),
    ]
    assert [job.due for job in read_trace(trace, speedup=2)] == [0.0, 0.75, 2.0]
    assert len(read_trace(trace, limit=2)) == 2


def test_a_trace_of_sessions_is_read_as_it_was_written(tmp_path: Path) -> None:
    jobs = [PlannedRequest(0, 0.0, 30, 4, "a"), PlannedRequest(1, 2.0, 40, 4, "a", 3.5), PlannedRequest(2, 4.0, 9, 1)]
    write_trace(tmp_path / "sessions.csv", jobs)
    assert read_trace(tmp_path / "sessions.csv") == jobs
    assert [(job.due, job.pause) for job in read_trace(tmp_path / "sessions.csv", speedup=2)] == [
        (0, 0),
        (1, 1.75),
        (2, 0),
    ]
    with pytest.raises(InvalidArgument, match="cannot write"):
        write_trace(tmp_path, jobs)


def test_long_requests_of_a_trace_are_cut(trace: Path) -> None:
    assert read_trace(trace, longest=100)[0] == PlannedRequest(0, 0.0, 60, 40)
    assert read_trace(trace, longest=30)[0] == PlannedRequest(0, 0.0, 1, 29)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("arrived_at,num_prefill_tokens\n1,2\n", "num_decode_tokens"),
        ("", "arrived_at"),
        (TRACE + "x,1,1\n", "trace.csv:5: arrived_at must be a number of seconds, got 'x'"),
        (TRACE + "\n\nnan,1,1\n", "trace.csv:7: arrived_at must be a number of seconds, got 'nan'"),
        ("arrived_at,num_prefill_tokens,num_decode_tokens,pause\n1,2,3,-1\n", "pause must be a number of seconds"),
        (TRACE + "15.0,1\n", "trace.csv:5: num_decode_tokens must be a number of tokens, at most 100,000,000, got ''"),
        (TRACE + "15.0,-1,1\n", "trace.csv:5: num_prefill_tokens must be"),
        (TRACE + f"15.0,{'9' * 5000},1\n", "trace.csv:5: num_prefill_tokens must be .* got '9{40}'"),
        (TRACE.splitlines()[0], "trace.csv has no requests"),
        (TRACE + "\0", "trace.csv:5: |is no CSV"),
        (TRACE + "\xff", "trace.csv is no CSV: .*utf-8"),
    ],
)
def test_a_bad_trace_is_refused_by_line_or_column(tmp_path: Path, text: str, names: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidArgument, match=names):
        read_trace(path)


def test_a_trace_may_come_in_any_order_and_from_a_spreadsheet(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("num_decode_tokens,arrived_at,num_prefill_tokens,model\n5,2.5,20,m\n40,1,300,m\n", "utf-8-sig")
    assert [(job.due, job.prompt, job.new) for job in read_trace(path)] == [(0.0, 300, 40), (1.5, 20, 5)]


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot read"):
        read_trace(tmp_path / "none.csv")


def test_duration_ends_a_load() -> None:
    jobs = uniform_jobs([0.0, 1.0, 2.0], 4, 4)
    assert due_within(jobs, None) == jobs
    assert [job.due for job in due_within(jobs, 2.0)] == [0.0, 1.0]
