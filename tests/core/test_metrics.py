"""Quantiles of the last minute, whatever came before."""

import math
import random

import pytest

from charonia.core.metrics import QuantileSummary, TimeInState


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_quantiles_are_right_to_a_hundredth() -> None:
    values = [random.Random(7).lognormvariate(5, 2) for _ in range(20_000)]
    summary = QuantileSummary((0, 0.5, 0.9, 0.99, 1), Clock())
    for value in values:
        summary.observe(value)
    assert (summary.count, summary.sum) == (20_000, pytest.approx(sum(values)))
    ordered = sorted(values)
    exact = [ordered[int(quantile * (len(values) - 1))] for quantile in summary.quantiles]
    assert summary.values() == pytest.approx(exact, rel=0.0101)


def test_it_looks_back_a_minute_and_counts_for_ever() -> None:
    clock = Clock()
    summary = QuantileSummary((1.0,), clock)
    assert math.isnan(summary.values()[0])
    summary.observe(1000)
    clock.now = 30
    summary.observe(10)
    assert summary.values() == pytest.approx([1000], rel=0.01)
    clock.now = 61
    assert summary.values() == pytest.approx([10], rel=0.01)
    clock.now = 95
    assert math.isnan(summary.values()[0])
    clock.now = 10_000
    summary.observe(5)
    assert summary.values() == pytest.approx([5], rel=0.01)
    assert (summary.count, summary.sum) == (3, 1015)


def test_nothing_takes_no_time() -> None:
    summary = QuantileSummary((0.5,), Clock())
    summary.observe(0)
    assert summary.values()[0] < 0.01


def test_time_in_a_state_counts_all_that_are_in_it_until_now() -> None:
    clock = Clock()
    waiting = TimeInState(clock)
    for change, seconds in ((1, 2.0), (2, 1.5), (-3, 10.0), (1, 0.5)):
        waiting.add(change)
        clock.now += seconds
    assert waiting.seconds == 1 * 2.0 + 3 * 1.5 + 0.5
    assert waiting.seconds == 7.0
