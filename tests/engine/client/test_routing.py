"""The rule that picks a replica, held to what it promises over all loads and caches."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.engine.client.routing import MAX_EXTRA_WORK, TOKENS_PER_REQUEST, ReplicaCandidate, choose_replica

tokens = st.integers(0, 4 * MAX_EXTRA_WORK)
prospect_lists = st.lists(st.builds(ReplicaCandidate, tokens, tokens, tokens, st.booleans()), min_size=1, max_size=8)


@given(prospect_lists, tokens)
def test_nobody_gets_much_more_than_the_least_busy_has(prospects: list[ReplicaCandidate], prompt: int) -> None:
    chosen = prospects[choose_replica(prospects, prompt)]
    assert chosen.work - min(prospect.work for prospect in prospects) <= max(MAX_EXTRA_WORK, chosen.cached_tokens)


@given(prospect_lists, tokens)
def test_with_nothing_cached_the_least_busy_gets_it_and_of_these_the_emptiest(
    prospects: list[ReplicaCandidate], prompt: int
) -> None:
    blank = [prospect._replace(cached_tokens=0, has_sibling=False) for prospect in prospects]
    chosen = blank[choose_replica(blank, prompt)]
    assert (chosen.work, chosen.kept_tokens) == min((each.work, each.kept_tokens) for each in blank)


@given(prospect_lists, tokens)
def test_of_equally_busy_ones_the_one_with_most_of_it_cached(prospects: list[ReplicaCandidate], prompt: int) -> None:
    even = [prospect._replace(work=0, has_sibling=False) for prospect in prospects]
    chosen, most = even[choose_replica(even, prompt)], max(each.cached_tokens for each in even)
    if most * 4 >= prompt:
        assert _worth(chosen.cached_tokens) == _worth(most)


@given(prospect_lists, tokens, st.data())
def test_the_order_decides_nothing_but_between_equals(
    prospects: list[ReplicaCandidate], prompt: int, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(prospects))
    first, second = prospects[choose_replica(prospects, prompt)], shuffled[choose_replica(shuffled, prompt)]
    assert (_cost(first, prompt), first.kept_tokens) == (_cost(second, prompt), second.kept_tokens)
    assert _cost(first, prompt) == min(_cost(prospect, prompt) for prospect in prospects)


def _cost(prospect: ReplicaCandidate, prompt: int) -> int:
    """By what stands in the documentation."""
    if prospect.has_sibling:
        return prospect.work - MAX_EXTRA_WORK
    return prospect.work - (_worth(prospect.cached_tokens) if prospect.cached_tokens >= prompt / 4 else 0)


def _worth(cached: int) -> int:
    return max(min(2 * cached, MAX_EXTRA_WORK), cached)


@given(prospect_lists, tokens, st.integers(0, 7), st.integers(1, MAX_EXTRA_WORK))
def test_more_work_never_draws_a_request(prospects: list[ReplicaCandidate], prompt: int, at: int, more: int) -> None:
    """Another than the chosen one that gets busier is not chosen then."""
    chosen = choose_replica(prospects, prompt)
    at %= len(prospects)
    if at != chosen:
        prospects[at] = prospects[at]._replace(work=prospects[at].work + more)
        assert choose_replica(prospects, prompt) == chosen


@pytest.mark.parametrize(
    ("prospects", "chosen"),
    [
        ([ReplicaCandidate(TOKENS_PER_REQUEST), ReplicaCandidate(0)], 1),
        ([ReplicaCandidate(TOKENS_PER_REQUEST, cached_tokens=600), ReplicaCandidate(0)], 0),
        ([ReplicaCandidate(4 * TOKENS_PER_REQUEST, cached_tokens=600), ReplicaCandidate(0)], 0),
        ([ReplicaCandidate(5 * TOKENS_PER_REQUEST, cached_tokens=600), ReplicaCandidate(0)], 1),
        ([ReplicaCandidate(0, cached_tokens=200), ReplicaCandidate(0, kept_tokens=0)], 0),
        (
            [ReplicaCandidate(0, cached_tokens=100, kept_tokens=1), ReplicaCandidate(0)],
            1,
        ),  # a beginning that everybody has is no reason
        ([ReplicaCandidate(0, kept_tokens=9000), ReplicaCandidate(0, kept_tokens=100)], 1),
        ([ReplicaCandidate(50_000, cached_tokens=100_000), ReplicaCandidate(0)], 0),  # it waits for less than it saves
        ([ReplicaCandidate(8 * TOKENS_PER_REQUEST, cached_tokens=600, has_sibling=True), ReplicaCandidate(0)], 0),
        ([ReplicaCandidate(17 * TOKENS_PER_REQUEST, cached_tokens=600, has_sibling=True), ReplicaCandidate(0)], 1),
    ],
)
def test_what_outweighs_what(prospects: list[ReplicaCandidate], chosen: int) -> None:
    assert choose_replica(prospects, prompt=600) == chosen
