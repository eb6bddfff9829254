"""What the costs of several frontends say."""

import pytest

from charonia.bench.frontends import FrontendLeg, judge


def leg(server: str, hub: float, frontends: float = 0.0) -> FrontendLeg:
    return FrontendLeg(server=server, load="binary", count=1, per_second=1.0, hub=hub, frontends=frontends, engine=9.0)


def test_medians_are_held_against_the_bars() -> None:
    legs = {
        "one": [leg("one", 90), leg("one", 110), leg("one", 100)],
        "several": [leg("several", 20, 100)],
        "before": [leg("before", 105)],
    }
    found = judge("binary", legs)
    assert (found.one, found.hub, found.frontends, found.before) == (100, 20, 100, 105)
    assert (found.hub_share, found.whole_ratio, found.holds) == (0.2, 1.2, True)


@pytest.mark.parametrize(("hub", "frontends"), [(21, 100), (20, 111)])
def test_a_bar_is_missed(hub: float, frontends: float) -> None:
    found = judge("binary", {"one": [leg("one", 100)], "several": [leg("several", hub, frontends)]})
    assert not found.holds
    assert found.before is None


def test_more_frontends_do_more_until_the_hub_is_full() -> None:
    found = judge("binary", {"one": [leg("one", 100)], "several": [leg("several", 20, 100)]})
    assert [found.rate(count) for count in (1, 2, 4, 8)] == [10_000, 20_000, 40_000, 50_000]
