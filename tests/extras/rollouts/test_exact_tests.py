"""Tails of exact tests, beside sums of whole numbers."""

from fractions import Fraction
from math import comb

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.extras.rollouts.exact_tests import binomial_tail, hypergeometric_tail


@given(st.integers(1, 60), st.data(), st.fractions(0, 1, max_denominator=50))
def test_the_binomial_tail_is_exact_above_the_mean(trials: int, data: st.DataObject, share: Fraction) -> None:
    successes = data.draw(st.integers(0, trials))
    chances = [comb(trials, n) * share**n * (1 - share) ** (trials - n) for n in range(successes, trials + 1)]
    exact = 1.0 if successes <= trials * float(share) else float(sum(chances))
    assert binomial_tail(successes, trials, float(share)) == pytest.approx(exact, rel=1e-9)


@given(st.integers(0, 40), st.integers(0, 40), st.data())
def test_the_hypergeometric_tail_is_exact_above_the_mean(drawn: int, others: int, data: st.DataObject) -> None:
    marked, others_marked = data.draw(st.integers(0, drawn)), data.draw(st.integers(0, others))
    all_marked = marked + others_marked
    ways = [comb(drawn, n) * comb(others, all_marked - n) for n in range(marked, min(drawn, all_marked) + 1)]
    over_mean = marked * (drawn + others) > all_marked * drawn
    exact = float(Fraction(sum(ways), comb(drawn + others, all_marked))) if over_mean else 1.0
    assert hypergeometric_tail(marked, drawn, others_marked, others) == pytest.approx(exact, rel=1e-9)


def test_large_counts_neither_overflow_nor_take_long() -> None:
    assert binomial_tail(10_500, 1_000_000, 0.01) == pytest.approx(2.8e-7, rel=0.3)
    assert binomial_tail(500_000, 1_000_000, 0.01) == 0
    assert hypergeometric_tail(300, 300, 0, 10_000_000) < 1e-300
