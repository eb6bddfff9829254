"""Arrivals, traces, and loads that are described."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia.core.errors import InvalidArgument
from charonia.planning import requests as planning_requests
from charonia.planning.requests import (
    FleetLoad,
    PlannedRequest,
    due_within,
    make_requests,
    poisson,
    read_trace,
    uniform_jobs,
)

TRACE = "arrived_at,num_prefill_tokens,num_decode_tokens\n10.0,300,40\n11.5,20,5\n14.0,7,1\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


def test_seeds_reproduce_arrivals() -> None:
    assert poisson(3.0, 7, 50) == poisson(3.0, 7, 50)
    assert poisson(3.0, 7, 50) != poisson(3.0, 8, 50)


def test_arrivals_have_their_rate_and_no_memory() -> None:
    times = poisson(4.0, 1, 20_000)
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
        (TRACE + "x,1,1\n", "trace.csv:5: arrived_at must be a number of seconds, got 'x'"),
        (TRACE + "\n\nnan,1,1\n", "trace.csv:7: arrived_at must be a number of seconds, got 'nan'"),
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


def test_a_described_load_has_its_rate_lengths_tenants_and_prefixes() -> None:
    load = FleetLoad(
        rate=50,
        duration=40,
        prompt="100-300",
        new="20~0.5",
        tenant=("free=3", "gold=1,4,2"),
        shared_prefix=64,
        prefixes=3,
    )
    found = make_requests(load, 4096)
    assert len(found) == pytest.approx(2000, rel=0.1)
    assert max(each.at for each in found) < 40
    assert {each.prompt for each in found} == {*range(100, 301)}
    assert np.median([each.new for each in found]) == pytest.approx(20, abs=2)
    assert {each.tenant: (each.weight, each.priority) for each in found} == {"free": (1, 0), "gold": (4, 2)}
    assert sum(each.tenant == "gold" for each in found) == pytest.approx(len(found) / 4, rel=0.2)
    assert {each.prefix for each in found} == {0, 1, 2}
    assert {each.shared for each in found} == {64}
    assert found == make_requests(load, 4096)


def test_burstiness_spreads_the_gaps_and_leaves_the_rate() -> None:
    for burstiness in (0.0, 0.5, 4.0):
        load = FleetLoad(rate=10, requests=20_000, prompt="8", new="1", burstiness=burstiness)
        gaps = np.diff([each.at for each in make_requests(load, 64)])
        assert np.mean(gaps) == pytest.approx(0.1, rel=0.1)
        assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness, rel=0.1, abs=1e-9)


def test_a_load_that_would_fill_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning_requests, "_MOST_REQUESTS", 1000)
    assert len(make_requests(FleetLoad(rate=1e9, requests=1000), 64)) == 1000
    for more in ({"requests": 1001}, {"duration": 1e9}):
        with pytest.raises(InvalidArgument, match="more than 1,000 requests"):
            make_requests(FleetLoad(rate=1e9, **more), 64)


def test_bursts_fill_the_whole_time() -> None:
    loads = [FleetLoad(rate=20, duration=10, prompt="8", new="1", burstiness=20, seed=seed) for seed in range(8)]
    found = max((make_requests(load, 64) for load in loads), key=len)
    assert len(found) > 3 * 20 * 10
    assert max(each.at for each in found) < 10


def test_with_a_rate_a_trace_gives_lengths_alone_again_and_again(trace: Path) -> None:
    found = make_requests(FleetLoad(trace=trace, rate=5, requests=4), 100)
    assert [(each.prompt, each.new) for each in found] == [(60, 40), (20, 5), (7, 1), (60, 40)]
    assert [each.at for each in found] == poisson(5, 0, 4)
    assert [each.at for each in make_requests(FleetLoad(trace=trace, speedup=2, duration=1.0), 4096)] == [0.0, 0.75]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({}, "give --trace or --rate"),
        ({"rate": 1.0}, "--requests or --duration"),
        ({"rate": 1.0, "duration": 1e-9}, "no requests"),
        ({"rate": -1.0}, "rate must be above 0"),
        ({"rate": 1.0, "requests": 1, "burstiness": -1.0}, "burstiness must be at least 0"),
        ({"rate": 1.0, "requests": 1, "prompt": "9-3"}, "prompt must be a number of tokens"),
        ({"rate": 1.0, "requests": 1, "new": "many"}, "new must be a number of tokens"),
        ({"rate": 1.0, "requests": 1, "tenant": ("gold",)}, "tenant must be NAME"),
        ({"rate": 1.0, "requests": 1, "tenant": ("gold=0",)}, "tenant must be NAME"),
        ({"rate": 1.0, "requests": 1, "tenant": ("gold=1,2,3,4",)}, "tenant must be NAME"),
        ({"rate": 1.0, "requests": 1, "tenant": ("gold=1,1,0.5",)}, "tenant must be NAME"),
        ({"rate": 1.0, "requests": 1, "tenant": ("gold=nan",)}, "tenant must be NAME"),
        ({"rate": 1.0, "requests": 1, "tenant": ("gold=1", "gold=2")}, "the tenant 'gold' is there twice"),
        ({"rate": float("nan"), "requests": 1}, "rate must be above 0, got nan"),
        ({"rate": 1.0, "duration": float("inf")}, "duration must be above 0, got inf"),
        ({"rate": 1.0, "requests": 1, "burstiness": float("inf")}, "burstiness must be at least 0 and at most 100"),
        ({"rate": 1.0, "requests": 1, "prompt": "100~999"}, "prompt must be a number of tokens"),
        ({"rate": 1.0, "requests": 1, "prompt": "9" * 30}, "prompt must be a number of tokens"),
        ({"rate": 1.0, "requests": 1, "seed": -1}, "seed must be at least 0"),
        ({"rate": 1.0, "requests": 1, "longest": 1}, "longest must be at least 2"),
        ({"rate": 1.0, "requests": 1, "speedup": 2.0}, "--speedup means nothing here"),
        ({"rate": 1.0, "requests": 1, "prefixes": 2}, "--prefixes means nothing here: it is of --shared-prefix"),
        ({"trace": Path("t.csv"), "prompt": "9"}, "--prompt means nothing here: a trace has its own"),
        ({"trace": Path("t.csv"), "burstiness": 2.0}, "--burstiness means nothing here: it is of --rate"),
    ],
)
def test_a_load_that_cannot_be_is_refused_by_name(wrong: dict[str, Any], says: str) -> None:
    with pytest.raises(InvalidArgument, match=says):
        make_requests(FleetLoad(**wrong), 4096)
