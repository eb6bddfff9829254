"""Objectives and bounds: how they are read, and how a trial is scored by them."""

import pytest

from charonia.bench.load.figures import Spread
from charonia.core.errors import InvalidArgument
from charonia.extras.optimizer.search_goal import (
    Bound,
    ConfigurationTrial,
    LevelFigures,
    SearchGoal,
    format_metric,
    parse_goal,
)


def level(name: str, throughput: float, seconds: float, **more: float) -> LevelFigures:
    return LevelFigures(level=name, requests=9, throughput=throughput, e2e=Spread.of([seconds]), **more)


def trial(*levels: LevelFigures) -> ConfigurationTrial:
    return ConfigurationTrial(configuration=(1,), seconds=1.0, setup=0.0, loading=1.0, levels=levels)


def test_bounds_are_read_with_their_units() -> None:
    goal = parse_goal("throughput", ["e2e_p99=20ms, memory=2GiB", "ttft_p95=1s,throughput=100"], streams=True)
    assert goal.bounds == (
        Bound("e2e_p99", 0.02),
        Bound("memory", 2**31),
        Bound("ttft_p95", 1.0),
        Bound("throughput", 100.0, at_least=True),
        Bound("failed", 0.0),
    )
    assert parse_goal("itl_mean", ["failed=5%"], streams=True).bounds == (Bound("failed", 0.05),)


@pytest.mark.parametrize("text", ["e2e=1s", "e2e_p99=1", "p99=20ms", "memory=2", "speed=3", "failed=1", "e2e_p42=1s"])
def test_what_is_no_bound_is_refused(text: str) -> None:
    with pytest.raises(InvalidArgument, match=f"constraint: '{text}' is of no form that is known: as in"):
        parse_goal("throughput", [text], streams=True)


def test_unknown_objectives_and_tokens_where_there_are_none_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="'speed' is none of throughput, memory, ttft_mean"):
        parse_goal("speed", [], streams=True)
    with pytest.raises(InvalidArgument, match="ttft_p99: the model's answers are no streams"):
        parse_goal("throughput", ["ttft_p99=1s"], streams=False)


def test_the_level_that_counts_is_the_best_that_keeps_the_bounds() -> None:
    goal = parse_goal("throughput", ["e2e_p99=20ms"], streams=False)
    score = goal.score(trial(level("1", 50, 0.01), level("8", 90, 0.015), level("32", 95, 0.04)))
    assert score is not None
    assert (score.level.level, score.value, score.feasible) == ("8", 90, True)
    missed = goal.score(trial(level("8", 90, 0.03), level("32", 95, 0.04)))
    assert missed is not None
    assert (missed.level.level, missed.excess) == ("8", pytest.approx(0.5))


def test_a_bound_that_is_missed_costs_more_than_the_objective_brings() -> None:
    goal = parse_goal("throughput", ["memory=1GiB"], streams=False)
    small, large = (
        goal.score(trial(level("1", speed, 0.1, memory=size))) for speed, size in ((100, 1e9), (120, 1.2e9))
    )
    assert small is not None
    assert large is not None
    assert goal.utility(small) > goal.utility(large)


def test_more_load_cannot_mend_a_latency_but_may_a_throughput() -> None:
    goal = parse_goal("throughput", ["e2e_p99=20ms", "throughput=100"], streams=False)
    assert goal.ends_levels(level("1", 50, 0.03))
    assert not goal.ends_levels(level("1", 50, 0.01))


def test_what_has_no_figure_has_no_score() -> None:
    goal = SearchGoal("ttft_p99")
    assert goal.score(trial(level("1", 50, 0.03))) is None
    assert goal.score(trial()) is None
    assert SearchGoal("throughput").score(trial(level("1", 0.0, 0.03, failed=1.0))) is None


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("memory", 3 * 2**30, "3.00 GiB"),
        ("memory", 2**20, "1 MiB"),
        ("failed", 0.25, "25.0%"),
        ("throughput", 1234.5, "1234/s"),
        ("throughput", 12.34, "12.3/s"),
        ("e2e_p99", 0.0123, "12.3 ms"),
        ("e2e_p99", 2.5, "2.500 s"),
    ],
)
def test_values_are_told_with_their_units(name: str, value: float, text: str) -> None:
    assert format_metric(name, value) == text
