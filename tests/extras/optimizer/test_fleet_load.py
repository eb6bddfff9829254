"""Loads that are described."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from charonia.bench.load import planned_requests
from charonia.bench.load.planned_requests import draw_arrivals
from charonia.core.errors import InvalidArgument
from charonia.extras.optimizer.fleet_load import make_requests
from charonia.extras.optimizer.options import FleetLoad

TRACE = "arrived_at,num_prefill_tokens,num_decode_tokens\n10.0,300,40\n11.5,20,5\n14.0,7,1\n"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "trace.csv"
    path.write_text(TRACE)
    return path


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


def test_a_shorter_prompt_begins_another_conversation_of_its_session(tmp_path: Path) -> None:
    trace = tmp_path / "sessions.csv"
    rows = ("0,10,2,a,0", "0,5,2,b,0", "0,20,2,a,1", "0,8,2,a,2", "0,9,2,,0")
    trace.write_text("\n".join(("arrived_at,num_prefill_tokens,num_decode_tokens,session,pause", *rows)))
    requests = make_requests(FleetLoad(trace=trace, retain=9.0), 4096)
    assert [(request.session, request.conversation, request.pause, request.last) for request in requests[:4]] == [
        (1, 1, 0.0, False),
        (2, 2, 0.0, True),
        (1, 1, 1.0, True),
        (1, 3, 2.0, True),
    ]
    assert requests[4].session == 0
    assert [request.retention is not None for request in requests] == [True] * 4 + [False]


def test_burstiness_spreads_the_gaps_and_leaves_the_rate() -> None:
    for burstiness in (0.0, 0.5, 4.0):
        load = FleetLoad(rate=10, requests=20_000, prompt="8", new="1", burstiness=burstiness)
        gaps = np.diff([request.at for request in make_requests(load, 64)])
        assert np.mean(gaps) == pytest.approx(0.1, rel=0.1)
        assert np.std(gaps) / np.mean(gaps) == pytest.approx(burstiness, rel=0.1, abs=1e-9)


def test_a_load_that_would_fill_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned_requests, "_MOST_REQUESTS", 1000)
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
    assert [each.at for each in found] == draw_arrivals(5, 0, 4)
    assert [request.at for request in make_requests(FleetLoad(trace=trace, speedup=2, duration=1.0), 4096)] == [
        0.0,
        0.75,
    ]


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
