"""The rule that picks a replica, held to what it promises over all loads and caches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.engine.frontend.routing import REACH, SEQUENCE, Prospect, choose

tokens = st.integers(0, 4 * REACH)
prospect_lists = st.lists(st.builds(Prospect, tokens, tokens, tokens, st.booleans()), min_size=1, max_size=8)


@given(prospect_lists, tokens)
def test_nobody_gets_much_more_than_the_least_busy_has(prospects: list[Prospect], prompt: int) -> None:
    chosen = prospects[choose(prospects, prompt)]
    assert chosen.work - min(each.work for each in prospects) <= REACH


@given(prospect_lists, tokens)
def test_with_nothing_cached_the_least_busy_gets_it_and_of_these_the_emptiest(
    prospects: list[Prospect], prompt: int
) -> None:
    blank = [each._replace(cached=0, sibling=False) for each in prospects]
    chosen = blank[choose(blank, prompt)]
    assert (chosen.work, chosen.kept) == min((each.work, each.kept) for each in blank)


@given(prospect_lists, tokens)
def test_of_equally_busy_ones_the_one_with_most_of_it_cached(prospects: list[Prospect], prompt: int) -> None:
    even = [each._replace(work=0, sibling=False) for each in prospects]
    chosen, most = even[choose(even, prompt)], max(each.cached for each in even)
    if most * 4 >= prompt:
        assert min(2 * chosen.cached, REACH) == min(2 * most, REACH)


@given(prospect_lists, tokens, st.data())
def test_the_order_decides_nothing_but_between_equals(
    prospects: list[Prospect], prompt: int, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(prospects))
    first, second = prospects[choose(prospects, prompt)], shuffled[choose(shuffled, prompt)]
    assert (_cost(first, prompt), first.kept) == (_cost(second, prompt), second.kept)
    assert _cost(first, prompt) == min(_cost(each, prompt) for each in prospects)


def _cost(prospect: Prospect, prompt: int) -> int:
    """By what stands in the documentation."""
    if prospect.sibling:
        return prospect.work - REACH
    return prospect.work - (min(2 * prospect.cached, REACH) if prospect.cached >= prompt / 4 else 0)


@given(prospect_lists, tokens, st.integers(0, 7), st.integers(1, REACH))
def test_more_work_never_draws_a_request(prospects: list[Prospect], prompt: int, at: int, more: int) -> None:
    """Another than the chosen one that gets busier is not chosen then."""
    chosen = choose(prospects, prompt)
    at %= len(prospects)
    if at != chosen:
        prospects[at] = prospects[at]._replace(work=prospects[at].work + more)
        assert choose(prospects, prompt) == chosen


@pytest.mark.parametrize(
    ("prospects", "chosen"),
    [
        ([Prospect(SEQUENCE), Prospect(0)], 1),
        ([Prospect(SEQUENCE, cached=600), Prospect(0)], 0),
        ([Prospect(4 * SEQUENCE, cached=600), Prospect(0)], 0),
        ([Prospect(5 * SEQUENCE, cached=600), Prospect(0)], 1),
        ([Prospect(0, cached=200), Prospect(0, kept=0)], 0),
        ([Prospect(0, cached=100, kept=1), Prospect(0)], 1),  # a beginning that everybody has is no reason
        ([Prospect(0, kept=9000), Prospect(0, kept=100)], 1),
        ([Prospect(8 * SEQUENCE, cached=600, sibling=True), Prospect(0)], 0),
        ([Prospect(17 * SEQUENCE, cached=600, sibling=True), Prospect(0)], 1),
    ],
)
def test_what_outweighs_what(prospects: list[Prospect], chosen: int) -> None:
    assert choose(prospects, prompt=600) == chosen
