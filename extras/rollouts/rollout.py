"""A rollout: a route's new arm gets more of its requests step by step while guards hold, or none again.

A step lasts some time, and some requests; then one-sided exact tests judge each guard. Of a hundred rollouts of a
version as good as the others at most four go back: all tests share that chance (Bonferroni).
"""

import math
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

import msgspec

from ...core.request_context import RequestContext
from ...routing.route import Route, RouteArm, RouteTarget
from .arm_samples import ArmSamples
from .exact_tests import binomial_tail, hypergeometric_tail
from .guard import Guard, parse_guards

_LEVEL = 0.03
"""The chance that a version which is as good as the others goes back at the end of any interval, at most."""

_DOUBT = 0.2
"""A bound that holds is doubted with this chance, at most: then the step lasts longer, unless the others tell more."""

_EARLY = 0.01
"""The part of an interval's level that each look before its end has: for what nobody would wait for (Haybittle, British
Journal of Radiology 44, 1971). There are few: each is at twice as many requests as the one before."""

_FIRST_LOOK = 1 / 6
"""The first look comes after this share of the requests that an interval needs."""


class Decision(StrEnum):
    GO_ON = "go on"
    WAIT = "wait"
    GO_BACK = "go back"


class Judgement(NamedTuple):
    """A decision, and why, as a sentence with numbers."""

    decision: Decision
    reason: str


class RolloutPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a rollout does. `steps`: the new arm's per cent of the requests; the last is 100. `every`: seconds of an
    interval, which also lasts until `min_requests` of the new arm have ended. `guard`: see `parse_guards`."""

    to: RouteTarget
    steps: tuple[float, ...] = (1, 5, 25, 100)
    every: float = 300.0
    min_requests: int = 300
    guard: str = "error_rate < 1 %"

    def __post_init__(self) -> None:
        if not self.to.version:
            raise ValueError("a rollout needs the number of a version to go to")
        if not self.steps or self.steps[-1] != 100:
            raise ValueError("the last of the steps must be 100")
        if not all(one < next_ for one, next_ in pairwise((0.0, *self.steps))):
            steps = ",".join(f"{step:g}" for step in self.steps)
            raise ValueError(f"steps must rise from above 0 to 100, got {steps}")
        if not 0 < self.every < math.inf:
            raise ValueError(f"every must be more than 0 seconds, got {self.every:g}")
        if self.min_requests < 1:
            raise ValueError(f"min_requests must be at least 1, got {self.min_requests}")
        relative = next((guard for guard in parse_guards(self.guard) if guard.relative), None)
        if relative is not None and len(self.steps) == 1:
            raise ValueError(f"guard '{relative.text}' compares arms: it needs a step below 100, where there are two")


class _Crossings(NamedTuple):
    """Requests beyond a guard's bound, and of how many: of the new arm, and of the others."""

    new: int
    new_of: int
    others: int
    others_of: int


class RolloutWatch:
    """Watches the arms in one step of a rollout, and decides when it is over. `began`: by the clock of `now`.

    It counts from the beginning again after an interval in which a bound was doubted, and not enough for going back;
    `doubt` tells why.
    """

    def __init__(self, plan: RolloutPlan, step: int, began: float) -> None:
        self.plan = plan
        self.step = step
        self.guards = parse_guards(plan.guard)
        self._model = plan.to.model
        self._version = str(plan.to.version)
        self.repeats = 0
        self.doubt = ""
        self._begin(began)

    def _begin(self, now: float) -> None:
        latencies = {guard.latency for guard in self.guards if guard.latency is not None}
        self.new = ArmSamples(latencies)
        self.others = ArmSamples(latencies)
        self.began = now
        self._next_look = math.ceil(self.plan.min_requests * _FIRST_LOOK)

    def observe(self, context: RequestContext) -> None:
        """Count a request for the route that has ended."""
        is_new = context.version == self._version and context.model == self._model
        (self.new if is_new else self.others).observe(context)

    def decide(self, now: float) -> Judgement:
        """What to do now; to be asked every now and then."""
        plan = self.plan
        ended = self.new.ended
        if ended >= plan.min_requests and now >= self.began + plan.every:
            return self._end_interval(now)
        if ended >= self._next_look:
            while self._next_look <= ended:
                self._next_look *= 2
            early = self._judge(self._level * _EARLY, self._level * _EARLY)
            if early.decision is Decision.GO_BACK:
                return early
        return Judgement(Decision.WAIT, self.progress(now))

    def progress(self, now: float) -> str:
        """What the interval still waits for."""
        plan = self.plan
        seconds = min(max(now - self.began, 0), plan.every)
        said = f"{self.new.ended:,} of {plan.min_requests:,} requests, {seconds:.0f} of {plan.every:g} s"
        return f"{said}; again, for {self.doubt}" if self.doubt else said

    def _end_interval(self, now: float) -> Judgement:
        judgement = self._judge(self._level, _DOUBT)
        if judgement.decision is Decision.WAIT:
            self.repeats += 1
            self.doubt = judgement.reason
            self._begin(now)
        return judgement

    @property
    def _level(self) -> float:
        """The level of each of a guard's two tests in this interval. A step's first has four fifths of the step's
        share, and all that repeat it have the rest."""
        tests = 2 * len(self.plan.steps) * max(len(self.guards), 1)
        part = 0.2 / (self.repeats * (self.repeats + 1)) if self.repeats else 0.8
        return part * _LEVEL / tests

    def _judge(self, level: float, doubt: float) -> Judgement:
        judged = [self._judge_guard(guard, level, doubt) for guard in self.guards]
        for decision in (Decision.GO_BACK, Decision.WAIT, Decision.GO_ON):
            reasons = [judgement.reason for judgement in judged if judgement.decision is decision]
            if reasons:
                return Judgement(decision, "; ".join(reasons))
        return Judgement(Decision.GO_ON, "there are no guards")

    def _judge_guard(self, guard: Guard, level: float, doubt: float) -> Judgement:
        """The bound is tested alone, and the new arm against the others: what all arms do is not the new one's fault.

        A latency's test against the others is that of precedence, which knows nothing of how latencies are distributed
        (Balakrishnan and Ng, "Precedence-Type Tests and Applications", 2006).
        """
        crossings = self._crossings(guard)
        reason = self._describe(guard)
        beside = hypergeometric_tail(*crossings)
        if guard.relative:
            if guard.latency is None:
                odds = guard.bound * crossings.new_of
                share = odds / ((odds + crossings.others_of) or 1)
                beside = binomial_tail(crossings.new, crossings.new + crossings.others, share)
            return Judgement(Decision.GO_BACK if beside <= level else Decision.GO_ON, reason)
        alone = binomial_tail(crossings.new, crossings.new_of, guard.allowed)
        if alone <= doubt and beside <= level:
            return Judgement(Decision.GO_BACK, reason)
        others_hold = crossings.others <= max(guard.allowed * crossings.others_of, 1)  # one of a few tells nothing
        if alone <= level and others_hold:
            return Judgement(Decision.GO_BACK, reason)
        return Judgement(Decision.WAIT if alone <= doubt else Decision.GO_ON, reason)

    def _crossings(self, guard: Guard) -> _Crossings:
        new = self.new
        others = self.others
        if guard.latency is None:
            return _Crossings(new.failed, new.ended, others.failed, others.ended)
        ours = new.latencies[guard.latency]
        theirs = others.latencies[guard.latency]
        of = ours.counts.total()
        others_of = theirs.counts.total()
        if not guard.relative:
            return _Crossings(ours.above(guard.bound), of, theirs.above(guard.bound), others_of)
        if not others_of:
            return _Crossings(0, of, 0, 0)
        beside = theirs.quantile(guard.quantile)
        return _Crossings(ours.above(beside * guard.bound), of, theirs.above(beside), others_of)

    def _describe(self, guard: Guard) -> str:
        said = [_described(guard, self.new)]
        if self.others.ended:
            said.append(f"of the other arms {_described(guard, self.others)}")
        elif guard.relative:
            said.append("with no other arm to compare with")
        return f"{guard.text}: {', '.join(said)}"


def _described(guard: Guard, samples: ArmSamples) -> str:
    if guard.latency is None:
        rate = 100 * samples.failed / samples.ended if samples.ended else 0
        return f"{rate:.3g} % ({samples.failed:,} of {samples.ended:,})"
    counts = samples.latencies[guard.latency]
    of = counts.counts.total()
    return f"{counts.quantile(guard.quantile):,.4g} ms of {of:,}" if of else "no such time"


def share_of(route: Route, to: RouteTarget) -> float:
    """The per cent of the requests that an arm has by its weight, 0 for one that is not there."""
    total = math.fsum(arm.weight for arm in route.arms)
    return 100 * math.fsum(arm.weight for arm in route.arms if _is_arm(arm, to)) / total


def with_share(route: Route, to: RouteTarget, percent: float) -> Route:
    """The route in which that arm has so many per cent of the requests; the others share the rest as they did."""
    others = [arm for arm in route.arms if not _is_arm(arm, to)]
    total = math.fsum(arm.weight for arm in others)
    factor = (100 - percent) / total if total else 0
    arms = [RouteArm(arm.model, arm.version, arm.weight * factor) for arm in others]
    return msgspec.structs.replace(route, arms=(*arms, RouteArm(to.model, to.version, percent)))


def with_all(route: Route, to: RouteTarget) -> Route:
    """The route whose requests all go to that arm: of the others those stay that a rule names."""
    route = with_share(route, to, 100)
    named = {(rule.to.model, rule.to.version) for rule in route.rules}
    kept = tuple(arm for arm in route.arms if arm.weight or (arm.model, arm.version) in named)
    return msgspec.structs.replace(route, arms=kept)


def pinned(route: Route, model: str, latest: int) -> Route:
    """The route with that number in place of "the latest version" of that model. Raises `ValueError` if an arm has it
    already."""

    def number(target: RouteTarget) -> int:
        return latest if target.model == model and not target.version else target.version

    arms = tuple(RouteArm(arm.model, number(arm), arm.weight) for arm in route.arms)
    rules = tuple(msgspec.structs.replace(rule, to=RouteTarget(rule.to.model, number(rule.to))) for rule in route.rules)
    return msgspec.structs.replace(route, arms=arms, rules=rules)


def _is_arm(arm: RouteArm, target: RouteTarget) -> bool:
    return (arm.model, arm.version) == (target.model, target.version)
