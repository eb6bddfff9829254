"""Arrivals, traces and prompts."""

from pathlib import Path

import numpy as np
import pytest

from charonia.bench.load.plan import PlannedRequest, Prompts, due_within, poisson, read_trace, uniform_jobs
from charonia.core.errors import InvalidArgument

TRACE = "arrived_at,num_prefill_tokens,num_decode_tokens\n10.0,300,40\n11.5,20,5\n14.0,7,1\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def test_seeds_reproduce_arrivals() -> None:
    assert poisson(3.0, 50, seed=7) == poisson(3.0, 50, seed=7)
    assert poisson(3.0, 50, seed=7) != poisson(3.0, 50, seed=8)


def test_arrivals_have_their_rate_and_no_memory() -> None:
    times = poisson(4.0, 20_000, seed=1)
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


def test_long_requests_of_a_trace_are_cut(trace: Path) -> None:
    assert read_trace(trace, longest=100)[0] == PlannedRequest(0, 0.0, 60, 40)
    assert read_trace(trace, longest=30)[0] == PlannedRequest(0, 0.0, 1, 29)


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("arrived_at,num_prefill_tokens\n1,2\n", "num_decode_tokens"),
        ("", "arrived_at"),
        (TRACE + "x,1,1\n", "trace.csv:5"),
        (TRACE + "15.0,1\n", "trace.csv:5"),
    ],
)
def test_a_bad_trace_is_refused_by_line_or_column(tmp_path: Path, text: str, names: str) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=names):
        read_trace(path)


def test_a_missing_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="cannot read"):
        read_trace(tmp_path / "none.csv")


def test_duration_ends_a_load() -> None:
    jobs = uniform_jobs([0.0, 1.0, 2.0], 4, 4)
    assert due_within(jobs, None) == jobs
    assert [job.due for job in due_within(jobs, 2.0)] == [0.0, 1.0]


def test_prompts_are_distinct_as_long_as_asked_and_reproducible() -> None:
    prompts = Prompts(vocab=50, seed=3)
    one, two = prompts.write(PlannedRequest(0, 0, 20, 1)), prompts.write(PlannedRequest(1, 0, 20, 1))
    assert len(one) == len(two) == 20
    assert one != two
    assert one == Prompts(vocab=50, seed=3).write(PlannedRequest(0, 0, 20, 1))
    assert all(isinstance(token, int) and 0 <= token < 50 for token in one)


def test_prompts_may_share_their_beginning() -> None:
    prompts = Prompts(shared=8)
    one, two = prompts.write(PlannedRequest(0, 0, 12, 1)), prompts.write(PlannedRequest(1, 0, 12, 1))
    assert one[:8] == two[:8]
    assert one[8:] != two[8:]
    assert len(prompts.write(PlannedRequest(2, 0, 5, 1))) == 5


def test_text_has_a_word_for_each_token() -> None:
    text = Prompts(form="text").write(PlannedRequest(0, 0, 9, 1))
    assert isinstance(text, str)
    assert len(text.split()) == 9
