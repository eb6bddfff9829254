"""A rollout's steps and guards, on a clock that tests turn: when it goes on, and when it goes back."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from charonia.core.errors import InvalidArgument
from charonia.core.request import FinishReason
from charonia.core.request_context import CANCELLED, DONE, Outcome, RequestContext, RequestEnd
from charonia.core.sampling import SamplingParams
from charonia.extras.rollouts.arm_samples import LatencyCounts
from charonia.extras.rollouts.guard import Latency
from charonia.extras.rollouts.rollout import Decision, RolloutPlan, RolloutWatch, with_all, with_share
from charonia.routing.arm_selector import StickyHash
from charonia.routing.route import Route, RouteArm, RouteRule, RouteTarget

from ...proofs.rollout_guards import (
    GUARDS,
    TIGHT,
    TO,
    RolloutTrial,
    Version,
    count_false_alarms,
    count_found,
)

TRIALS = 100


@pytest.mark.parametrize("others", [Version(), Version(fails=0.001)])
def test_a_version_that_fails_five_of_a_hundred_goes_back_in_the_first_interval(others: Version) -> None:
    assert count_found(TRIALS, others).back >= 99


@pytest.mark.parametrize(("guard", "both"), [(GUARDS, Version(fails=0.003)), (TIGHT, Version(fails=0.01))])
def test_equal_versions_seldom_go_back_in_a_whole_rollout(guard: str, both: Version) -> None:
    assert count_false_alarms(TRIALS, guard, both).back <= 5


def test_what_all_arms_do_is_waited_for_and_not_the_new_ones_fault() -> None:
    trial = RolloutTrial(1, "error_rate < 1 %")
    watch = RolloutWatch(trial.plan, 0, 0)
    trial.run_step(watch, Version(fails=0.3), Version(fails=0.3), 1)
    assert watch.repeats > 3
    assert watch.decide(trial.now).decision is Decision.WAIT
    assert "again, for error_rate < 1 %: " in watch.progress(trial.now)
    # It is over: the version that still fails is found, and one that does not goes on.
    assert trial.run_step(watch, Version(fails=0.3), Version(), 1) is Decision.GO_BACK


@pytest.mark.parametrize("guard", ["p50 < 1.2x", "ttft_p95 < 1.2x", "itl_p90 < 1.2x", "p99 < 400ms"])
def test_a_slow_version_goes_back_and_a_fast_one_on(guard: str) -> None:
    assert RolloutTrial(1, guard).run(Version(times=3), Version()) is Decision.GO_BACK
    assert RolloutTrial(1, guard).run(Version(times=0.5), Version()) is Decision.GO_ON


def test_a_version_that_fails_always_goes_back_long_before_the_interval_ends() -> None:
    trial = RolloutTrial(1, "error_rate < 1 %", every=3600)
    assert trial.run(Version(fails=1), Version()) is Decision.GO_BACK
    assert trial.now == 1


def test_at_a_hundred_per_cent_bounds_are_judged_alone_and_ratios_not() -> None:
    trial = RolloutTrial(1, GUARDS, steps=(50, 100))
    assert trial.run_step(RolloutWatch(trial.plan, 1, 0), Version(times=9), Version(), 100) is Decision.GO_ON
    watch = RolloutWatch(trial.plan, 1, trial.now)
    assert trial.run_step(watch, Version(fails=0.1), Version(), 100) is Decision.GO_BACK


def test_one_of_a_few_requests_to_the_others_does_not_excuse_the_new_arm() -> None:
    watch = RolloutWatch(RolloutPlan(to=TO, guard="error_rate < 1 %"), 3, 0)
    watch.new.ended, watch.new.failed = 300, 150
    watch.others.ended, watch.others.failed = 3, 1
    assert watch.decide(300).decision is Decision.GO_BACK


def test_without_guards_it_goes_on() -> None:
    trial = RolloutTrial(1, "")
    assert trial.run(Version(fails=1), Version()) is Decision.GO_ON


def test_an_error_rate_beside_that_of_the_others() -> None:
    assert RolloutTrial(1, "error_rate < 2x").run(Version(fails=0.2), Version(fails=0.02)) is Decision.GO_BACK
    assert RolloutTrial(1, "error_rate < 2x").run(Version(fails=0.2), Version(fails=0.2)) is Decision.GO_ON


def test_an_interval_lasts_its_time_and_its_requests() -> None:
    plan = RolloutPlan(to=TO, every=60, min_requests=10, guard="error_rate < 1 %, p99 < 1.2x")
    watch = RolloutWatch(plan, 0, 100.0)
    assert watch.decide(1000.0).reason == "0 of 10 requests, 60 of 60 s"
    watch.new.ended = watch.others.ended = 10
    watch.new.latencies[Latency.REQUEST].observe(30)
    assert watch.decide(159.0) == (Decision.WAIT, "10 of 10 requests, 59 of 60 s")
    judgement = watch.decide(160.0)
    assert judgement.decision is Decision.GO_ON
    assert judgement.reason.startswith("error_rate < 1 %: 0 % (0 of 10), of the other arms 0 % (0 of 10); p99 < 1.2x: ")


class Record:
    """One sequence of a request."""

    choice, prompt, cached, begun, opened = 0, 3, 0, None, 100.0
    sampling, finish_reason = SamplingParams(), FinishReason.STOP

    def __init__(self, first: float, last: float, generated: int) -> None:
        self.submitted, self.first, self.last, self.generated = 100.0, first, last, generated
        self.end = RequestEnd(Outcome.STOP)


def ended(end: RequestEnd, version: str = "2", *records: Record) -> RequestContext:
    context = RequestContext("test", model="m", version=version, arrived_at=100.0)
    for record in records:
        context.add_sequence(record)
    context.end, context.ended_at = end, 100.5
    return context


def test_requests_count_for_the_arm_that_served_them_and_faults_of_clients_for_none() -> None:
    watch = RolloutWatch(RolloutPlan(to=TO, guard="p50 < 1s, ttft_p50 < 1s, itl_p50 < 1s"), 0, 0)
    refused, shed = (
        RequestEnd(Outcome.REJECTED, "invalid_argument"),
        RequestEnd(Outcome.REJECTED, "queue_full_requests"),
    )
    away, broken = RequestEnd(Outcome.REJECTED, "unavailable"), RequestEnd(Outcome.ERROR, "internal")
    for end in (DONE, CANCELLED, refused, shed, away, broken, RequestEnd(Outcome.TIMEOUT)):
        watch.observe(ended(end))
    watch.observe(ended(DONE, "1"))
    assert (watch.new.ended, watch.new.failed, watch.others.ended, watch.others.failed) == (4, 3, 1, 0)
    watch.observe(ended(RequestEnd(Outcome.STOP), "1", Record(100.1, 100.3, 5)))
    medians = {latency: counts.quantile(0.5) for latency, counts in watch.others.latencies.items()}
    assert medians[Latency.FIRST_TOKEN] == pytest.approx(100, rel=0.01)
    assert medians[Latency.NEXT_TOKEN] == pytest.approx(50, rel=0.01)
    assert medians[Latency.REQUEST] == pytest.approx(500, rel=0.01)


@given(st.lists(st.floats(0.01, 1e6), min_size=1, max_size=50), st.floats(0.01, 1))
def test_quantiles_of_counted_latencies_are_right_to_a_hundredth(values: list[float], quantile: float) -> None:
    counts = LatencyCounts()
    for value in values:
        counts.observe(value)
    exact = sorted(values)[max(int(np.ceil(quantile * len(values))), 1) - 1]
    assert counts.quantile(quantile) == pytest.approx(exact, rel=0.0101)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"to": {"model": "m"}}, "needs the number of a version"),
        ({"steps": [5, 50]}, "the last of the steps must be 100"),
        ({"steps": [5, 5, 100]}, "steps must rise from above 0 to 100, got 5,5,100"),
        ({"steps": [0, 100]}, "steps must rise"),
        ({"steps": [math.nan, 100]}, "steps must rise"),
        ({"steps": []}, "the last of the steps must be 100"),
        ({"every": 0}, "every must be more than 0 seconds"),
        ({"min_requests": 0}, "min_requests must be at least 1"),
        ({"steps": [100], "guard": "p99 < 1.2x"}, "guard 'p99 < 1.2x' compares arms: it needs a step below 100"),
        ({"guard": "p99 < 1"}, "guard 'p99 < 1': a latency's bound"),
    ],
)
def test_a_wrong_plan_is_refused_with_what_is_wrong(plan: dict[str, Any], says: str) -> None:
    given = {"to": {"model": "m", "version": 2}, **plan}
    with pytest.raises((msgspec.ValidationError, InvalidArgument), match=says):
        msgspec.convert(given, RolloutPlan)


RULES = (RouteRule(to=RouteTarget("m", 3), header="x-old"),)


def test_shares_of_the_other_arms_stay_in_proportion() -> None:
    route = Route((RouteArm("m", 1, 60), RouteArm("m", 3, 20)), rules=RULES)
    grown = with_share(route, TO, 20)
    assert [(arm.version, arm.weight) for arm in grown.arms] == [(1, 60), (3, 20), (2, 20)]
    assert with_share(grown, TO, 60).arms == (RouteArm("m", 1, 30), RouteArm("m", 3, 10), RouteArm("m", 2, 60))
    assert with_share(grown, TO, 100).arms == (RouteArm("m", 1, 0), RouteArm("m", 3, 0), RouteArm("m", 2, 100))
    assert with_all(grown, TO) == Route((RouteArm("m", 3, 0), RouteArm("m", 2, 100)), rules=RULES)


def test_keys_move_to_the_new_arm_alone() -> None:
    route = Route((RouteArm("m", 1, 60), RouteArm("m", 3, 20)))
    keys = [f"user-{number}".encode() for number in range(3000)]
    before = [route.arms[StickyHash(route.arms).choose(key)].version for key in keys]
    for percent in (1, 5, 25, 100):
        arms = with_share(route, TO, percent).arms
        after = [arms[StickyHash(arms).choose(key)].version for key in keys]
        assert all(new in (old, 2) for old, new in zip(before, after, strict=True))
        assert abs(after.count(2) / 30 - percent) < 2
        before = after
