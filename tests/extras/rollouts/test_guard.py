"""Guards of a rollout, from their text."""

import pytest

from charonia.core.errors import InvalidArgument
from charonia.extras.rollouts.guard import Latency, parse_guards


@pytest.mark.parametrize(
    ("text", "latency", "quantile", "bound", "relative"),
    [
        ("error_rate < 1 %", None, 0, 0.01, False),
        ("error_rate<0.5%", None, 0, 0.005, False),
        ("error_rate < 0.02", None, 0, 0.02, False),
        ("error_rate < 2x", None, 0, 2, True),
        ("p99 < 1.2x", Latency.REQUEST, 0.99, 1.2, True),
        ("p99.9 < 1.5 s", Latency.REQUEST, 0.999, 1500, False),
        ("ttft_p95 < 800ms", Latency.FIRST_TOKEN, 0.95, 800, False),
        ("itl_p50 < 250 us", Latency.NEXT_TOKEN, 0.5, 0.25, False),
    ],
)
def test_a_guard_is_read(text: str, latency: Latency | None, quantile: float, bound: float, relative: bool) -> None:
    [guard] = parse_guards(text)
    assert (guard.latency, guard.relative, guard.text) == (latency, relative, text)
    assert (guard.quantile, guard.bound) == pytest.approx((quantile, bound))


def test_guards_stand_apart_by_commas() -> None:
    guards = parse_guards(" error_rate  < 1 %, p99 < 1.2x ,ttft_p95 < 1.2x,")
    assert [guard.name for guard in guards] == ["error_rate", "p99", "ttft_p95"]
    assert guards[0].text == "error_rate < 1 %"
    assert [guard.allowed for guard in guards] == pytest.approx([0.01, 0.01, 0.05])
    assert parse_guards("") == ()


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("error_rate > 1 %", "guard 'error_rate > 1 %' is not like one of"),
        ("errors < 1 %", "guard 'errors < 1 %': unknown measure 'errors'"),
        ("p99 < 1.2", "guard 'p99 < 1.2': a latency's bound ends with x or a unit: us, ms, s"),
        ("p99 < 5 %", "a latency's bound ends with x or a unit"),
        ("p100 < 5 s", "unknown measure 'p100'"),
        ("p0 < 5 s", "the percentile must be above 0"),
        ("p99 < 0x", "the bound must be above 0"),
        ("error_rate < 5 s", "a rate's bound is a share, or ends with % or x"),
        ("error_rate < 1", "the bound must be less than all requests"),
        ("error_rate < 100 %", "the bound must be less than all requests"),
        ("p99 < 1x, p99 < 2 s", "guard 'p99' is there twice"),
    ],
)
def test_a_wrong_guard_is_refused_with_what_is_wrong(text: str, says: str) -> None:
    with pytest.raises(InvalidArgument) as raised:
        parse_guards(text)
    assert says in raised.value.message
