"""Which versions a rollout sends back: `python -m tests.proofs.rollout_guards`.

Thousands of rollouts with requests by chance, on a clock that is turned. A version that fails 5 % of its requests,
where 1 % may, goes back within the first interval in at least 99 of 100. A version that is as good as the others goes
back in at most 5 of 100 whole rollouts, though they have several steps and guards, and bounds that it is right at.
"""

import math
import sys
from typing import Any, NamedTuple

import numpy as np
from cyclopts import App
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from charonia.extras.rollouts.arm_samples import ArmSamples
from charonia.extras.rollouts.rollout import Decision, RolloutPlan, RolloutWatch
from charonia.routing.route import RouteTarget

TO = RouteTarget("m", 2)
GUARDS = "error_rate < 1 %, p99 < 1.2x, ttft_p95 < 1.2x"
TIGHT = "error_rate < 1 %, p99 < 1x, ttft_p95 < 1x, p50 < 1x"
"""Bounds that a version which is as good as the others is right at."""

_BUCKET = math.log(1.01 / 0.99)
_AT_A_TIME = 50
_MOST_OTHERS = 500
"""Requests in a second: of the new version, and of the others at most."""

app = App(name="python -m tests.proofs.rollout_guards", help=__doc__)


class Version(NamedTuple):
    """`fails`: a share of its requests; latencies are `times` what they usually are."""

    fails: float = 0.0
    times: float = 1.0


class RolloutTrial:
    """One rollout with requests by chance, on a clock that goes a second at a time."""

    def __init__(self, seed: int, guard: str, every: float = 6, **plan: Any) -> None:
        self.random = np.random.default_rng(seed)
        self.plan = RolloutPlan(to=TO, guard=guard, every=every, **plan)
        self.now = 0.0

    def run(self, new: Version, others: Version) -> Decision:
        """The last decision."""
        decision = Decision.WAIT
        for step, percent in enumerate(self.plan.steps):
            watch = RolloutWatch(self.plan, step, self.now)
            decision = self.run_step(watch, new, others, percent)
            if decision is not Decision.GO_ON:
                break
        return decision

    def run_step(self, watch: RolloutWatch, new: Version, others: Version, percent: float) -> Decision:
        decision = Decision.WAIT
        for _ in range(1000):
            self.now += 1
            self.add(watch.new, new, _AT_A_TIME)
            self.add(watch.others, others, min(round(_AT_A_TIME * (100 - percent) / percent), _MOST_OTHERS))
            decision = watch.decide(self.now).decision
            if decision is not Decision.WAIT:
                break
        return decision

    def add(self, samples: ArmSamples, version: Version, requests: int) -> None:
        failed = int(self.random.binomial(requests, version.fails))
        samples.ended += requests
        samples.failed += failed
        for counts in samples.latencies.values():
            values = version.times * 50 * self.random.lognormal(0, 0.8, requests - failed)
            # log_bucket, for all at once
            buckets, numbers = np.unique(np.ceil(np.log(values) / _BUCKET).astype(int), return_counts=True)
            counts.counts.update(dict(zip(buckets.tolist(), numbers.tolist(), strict=True)))


class TrialCounts(NamedTuple):
    """Of so many `trials`, those that went back, in the first interval where that is what counts."""

    trials: int
    back: int


def count_found(trials: int, others: Version) -> TrialCounts:
    """Of a version that fails 5 %, how many go back in the first interval."""
    back = 0
    for seed in range(trials):
        trial = RolloutTrial(seed, GUARDS)
        watch = RolloutWatch(trial.plan, 0, 0)
        decision = trial.run_step(watch, Version(fails=0.05), others, trial.plan.steps[0])
        back += decision is Decision.GO_BACK and watch.repeats == 0
    return TrialCounts(trials, back)


def count_false_alarms(trials: int, guard: str, both: Version) -> TrialCounts:
    """Of a version that is as good as the others, how many go back in a whole rollout."""
    back = sum(RolloutTrial(seed, guard).run(both, both) is Decision.GO_BACK for seed in range(trials))
    return TrialCounts(trials, back)


@app.default
def main(*, trials: int = 2000) -> int:
    """Print how many go back; the exit code is 0 if these are neither too few nor too many.

    Parameters
    ----------
    trials
        Of each kind.
    """
    found, alarms = list[TrialCounts](), list[TrialCounts]()
    with Progress() as progress:
        task = progress.add_task("kinds of rollouts", total=5)
        for fails in (0.0, 0.001, 0.003):
            found.append(count_found(trials, Version(fails=fails)))
            progress.advance(task)
        for guards, both in ((GUARDS, Version(fails=0.003)), (TIGHT, Version(0.01))):
            alarms.append(count_false_alarms(trials, guards, both))
            progress.advance(task)
    table = Table("version", "trials", "went back")
    for said, counts in zip(("fails 5 %", "fails 5 %, others 0.1 %", "fails 5 %, others 0.3 %"), found, strict=True):
        table.add_row(said, *map(str, counts))
    for said, counts in zip(("equal", "equal, at its bounds"), alarms, strict=True):
        table.add_row(said, *map(str, counts))
    Console().print(table)
    holds = all(each.back >= 0.99 * trials for each in found) and all(alarm.back <= 0.05 * trials for alarm in alarms)
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(app())
