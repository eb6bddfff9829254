"""What grew between two scrapes."""

from contextlib import nullcontext

import pytest

from charonia.core.errors import InvalidArgument
from charonia.telemetry.scrape import Interval, ModelId, ModelInterval, parse_scrape, require_in_order

BEFORE = """\
# TYPE charonia_uptime_seconds gauge
charonia_uptime_seconds 100.0
charonia_model_ready{model="m",version="1"} 1
charonia_requests_total{model="m",version="1",outcome="stop"} 10
charonia_requests_total{model="m",version="1",outcome="length"} 4
charonia_requests_total{outcome="rejected"} 7
charonia_requests_running{model="m",version="1"} 2
# TYPE nv_inference_count counter
nv_inference_count{model="m",version="1"} 14
"""
AFTER = """\
# TYPE charonia_uptime_seconds gauge
charonia_uptime_seconds 104.0
charonia_model_ready{model="m",version="1"} 1
charonia_model_ready{model="a",version="2"} 0
charonia_requests_total{model="m",version="1",outcome="stop"} 13
charonia_requests_total{model="m",version="1",outcome="length"} 1
charonia_requests_total{model="m",version="1",outcome="error"} 5
charonia_requests_total{outcome="rejected"} 8
charonia_requests_running{model="m",version="1"} 4
# TYPE nv_inference_count counter
nv_inference_count{model="m",version="1"} 15
"""


def interval(before: str | None, after: str) -> Interval:
    return Interval(None if before is None else parse_scrape(before, "before"), parse_scrape(after, "after"))


def test_counters_grow_and_begin_anew() -> None:
    between = interval(BEFORE, AFTER)
    assert (between.seconds, between.since_start) == (4, False)
    assert between.models() == [ModelId("a", "2"), ModelId("m", "1")]
    seen = ModelInterval(between, ModelId("m", "1"))
    assert seen.grown("charonia_requests_total", outcome="stop") == 3
    assert seen.grown_by("charonia_requests_total", "outcome") == {"stop": 3, "length": 1, "error": 5}
    assert seen.grown("charonia_requests_total") == 9
    assert between.grown("charonia_requests_total") == 1
    assert seen.grown("nv_inference_count") == 1
    assert seen.gauge("charonia_requests_running") == 3
    assert seen.last_by("charonia_requests_running", "version") == {"1": 4}
    assert (seen.grown("no_such_family"), seen.gauge("no_such_family")) == (0, 0)
    assert ModelInterval(between, ModelId("a", "2")).grown("charonia_requests_total") == 0


@pytest.mark.parametrize("before", [None, AFTER])
def test_one_scrape_and_a_restart_are_of_the_time_since_the_start(before: str | None) -> None:
    alone = interval(before, BEFORE)
    assert (alone.seconds, alone.since_start) == (100, True)
    seen = ModelInterval(alone, ModelId("m", "1"))
    assert seen.grown("charonia_requests_total", outcome="stop") == 10
    assert seen.gauge("charonia_requests_running") == 2


@pytest.mark.parametrize(
    ("text", "error"), [("{}", "this is no text"), ("up 1\n", "charonia_uptime_seconds is missing")]
)
def test_what_is_no_scrape_is_told(text: str, error: str) -> None:
    with pytest.raises(InvalidArgument, match=f"saved.txt: {error}"):
        parse_scrape(text, "saved.txt")


def look(started: float, uptime: float) -> str:
    return f"charonia_start_time_seconds {started}\ncharonia_uptime_seconds {uptime}\n"


@pytest.mark.parametrize(
    ("before", "after", "error"),
    [
        ((1000, 50), (1000, 60), ""),
        ((1000, 50), (1060, 5), ""),  # started again
        ((0, 50), (0, 40), ""),  # a server that does not tell
        ((1000, 60), (1000, 50), "not later than the first"),
        ((1000, 50), (1000, 50), "not later than the first"),
        ((1000, 50), (900, 160), "of another server"),
        ((1060, 5), (1000, 50), "or is the earlier one"),
    ],
)
def test_two_looks_are_of_one_server_in_their_order(
    before: tuple[float, float], after: tuple[float, float], error: str
) -> None:
    scrapes = parse_scrape(look(*before), "before"), parse_scrape(look(*after), "after")
    with pytest.raises(InvalidArgument, match=error) if error else nullcontext():
        require_in_order(*scrapes)
