"""What limits each model: the time of its requests between two scrapes, charged to causes.

Every second that a request spent in the server is charged to one cause, and a cause's share is its part of all of
them. What a specific cause explains is not charged to a general one: docs/explain.md has the rules. No I/O.
"""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import msgspec

from .classic_claims import classic_claims
from .llm_claims import llm_claims
from .roofline import StepRoofline
from .scrape import Interval, ModelInterval
from .time_claims import Cause, TimeClaim, percent

_SATURATED = 0.9
"""The part of the time that the event loop's thread computes from which on all else is said to wait for it."""

_LATE = 0.02
"""Seconds that the event loop is late in the mean from which on tokens that lie unread are charged to it."""

_LEAST_SHARE = 0.01
"""Lesser causes are not told."""


class Bottleneck(msgspec.Struct, frozen=True):
    """What limits a model, in a sentence with its evidence, which is there in numbers too. `share`: of its requests'
    time, 0 to 1. `turn`: the flag or setting to turn, or what else to do."""

    cause: Cause
    share: float
    text: str
    turn: str = ""
    evidence: Mapping[str, float] = {}


class ModelReport(msgspec.Struct, frozen=True):
    """The bottlenecks of one version of a model, the worst first, over the last `seconds`; `since_start`: which are all
    since the server's start."""

    model: str
    version: str
    seconds: float
    since_start: bool
    bottlenecks: tuple[Bottleneck, ...]


class LoopFigures(NamedTuple):
    """An event loop: of `frontend`, one of several, or of the server's own process where that is empty. How late it was
    in the mean and at most, seconds; and the part of the time its thread computed."""

    frontend: str
    delay: float
    lag: float
    busy: float

    @property
    def saturated(self) -> bool:
        return self.busy >= _SATURATED

    @property
    def late(self) -> bool:
        return self.saturated or self.delay >= _LATE


class ServerLoops(NamedTuple):
    """The event loops that a request passes: that of the server's process, which is the hub where there are several
    `frontends`, and then that of one of these."""

    own: LoopFigures
    frontends: tuple[LoopFigures, ...]

    @classmethod
    def of(cls, interval: Interval) -> "ServerLoops":
        family = "charonia_event_loop_delay_seconds"
        probes, sums = (interval.grown_by(f"{family}_{part}", "frontend") for part in ("count", "sum"))
        computed = interval.grown_by("charonia_event_loop_cpu_seconds_total", "frontend")
        lags = interval.last_by("charonia_event_loop_lag_seconds", "frontend")

        def figures(name: str) -> LoopFigures:
            delay = sums.get(name, 0.0) / probes[name] if probes.get(name) else 0.0
            return LoopFigures(name, delay, lags.get(name, 0.0), min(computed.get(name, 0.0) / interval.seconds, 1.0))

        return cls(figures(""), tuple(figures(name) for name in sorted(lags) if name))

    @property
    def delay(self) -> float:
        """What a request waits in the mean when it passes."""
        return self.own.delay + self._mean([each.delay for each in self.frontends])

    @property
    def saturated(self) -> float:
        """The part of all time that loops without time left computed; connections lie on all frontends alike."""
        busy = self._mean([each.busy if each.saturated else 0.0 for each in self.frontends])
        return max(self.own.busy if self.own.saturated else 0.0, busy)

    @property
    def late(self) -> bool:
        return any(each.late for each in (self.own, *self.frontends))

    @property
    def worst(self) -> LoopFigures:
        loops = self.own, *self.frontends
        full = [each for each in loops if each.saturated]
        return max(full, key=lambda each: each.busy) if full else max(loops, key=lambda each: each.delay)

    @staticmethod
    def _mean(values: list[float]) -> float:
        return sum(values) / len(values) if values else 0.0


def explain(interval: Interval, rooflines: Mapping[str, StepRoofline] = {}, model: str = "") -> list[ModelReport]:
    """A report of each model that the server has, or of each version of one. `rooflines`: of language models, by name;
    without one, memory bandwidth and arithmetic are not told apart."""
    loops = ServerLoops.of(interval)
    models = [each for each in interval.models() if model in ("", each.name)]
    return [_explain_model(ModelInterval(interval, each), loops, rooflines) for each in models]


def is_language_model(seen: ModelInterval) -> bool:
    return bool(seen.last_by("charonia_tenant_weight", "tenant"))


def _explain_model(seen: ModelInterval, loops: ServerLoops, rooflines: Mapping[str, StepRoofline]) -> ModelReport:
    model = seen.model
    claims = [_loop_claim(seen, loops), *_cold_start_claims(seen)]
    if is_language_model(seen):
        claims += llm_claims(seen, loops.late, rooflines.get(model.name))
    else:
        claims += classic_claims(seen)
    found = tuple(_bottlenecks(claims, loops.saturated)) or (_idle(seen),)
    return ModelReport(model.name, model.version, seen.whole.seconds, seen.whole.since_start, found)


def _bottlenecks(claims: list[TimeClaim], saturated: float) -> Iterator[Bottleneck]:
    """The claims as shares of the time of all; those of one cause are one, told by the largest. `saturated`: the part
    of the time for which loops had none left."""
    total = sum(claim.seconds for claim in claims)
    if total <= 0:
        return
    shares: dict[Cause, float] = {}
    for claim in sorted(claims, key=lambda each: -each.seconds):
        shares[claim.cause] = shares.get(claim.cause, 0.0) + claim.seconds / total
    if saturated:
        own = max(shares.get(Cause.FRONTEND, 0.0), saturated)
        others = 1 - shares.get(Cause.FRONTEND, 0.0)
        shares = {cause: share * (1 - own) / others if others else 0.0 for cause, share in shares.items()}
        shares[Cause.FRONTEND] = own
    for cause in sorted(shares, key=lambda each: -shares[each]):
        share = shares[cause]
        told = max((claim for claim in claims if claim.cause is cause), key=lambda each: each.seconds)
        if share >= _LEAST_SHARE:
            text = f"{told.what}, {percent(share)} of the requests' time" + (f": {told.why}" if told.why else "")
            yield Bottleneck(cause, share, text, told.turn, told.evidence)


_LOG = "the log names what holds the loop for long"


def _loop_claim(seen: ModelInterval, loops: ServerLoops) -> TimeClaim:
    """A request passes each of its loops twice, when it comes and when it is answered; told of the worst."""
    ended, loop = seen.grown("charonia_requests_total"), loops.worst
    name, what = "the event loop", "requests wait for the frontend's event loop"
    turn = f"{_LOG}; fewer and larger requests, binary tensors, more --frontends, or another server"
    evidence = {"loop_busy": loop.busy, "loop_delay_seconds": loop.delay, "loop_lag_seconds": loop.lag}
    if loop.frontend:
        name, what = f"that of frontend {loop.frontend}", "requests wait for a frontend's event loop"
        turn = f"{_LOG}; more connections, of which each stays with one frontend; binary tensors, or more --frontends"
    elif loops.frontends:
        name, what = "it", "requests wait for the hub's event loop"
        turn = f"{_LOG}; fewer and larger requests, or another server: there is one hub, whatever --frontends says"
    why = (
        f"{name} computes {percent(loop.busy)} of the time, and is late by {1e3 * loop.delay:.1f} ms "
        f"in the mean, by {1e3 * loop.lag:.0f} ms at most"
    )
    return TimeClaim(Cause.FRONTEND, 2 * loops.delay * ended, what, why, turn, evidence)


def _cold_start_claims(seen: ModelInterval) -> Iterator[TimeClaim]:
    waited = seen.whole.grown("charonia_load_wait_seconds_total", model=seen.model.name)
    if not waited:
        return
    loads = seen.whole.grown("charonia_on_demand_loads_total")
    again = seen.whole.grown("charonia_on_demand_reloads_total")
    took = sum(seen.last_by("nv_model_load_duration_secs", "version").values())
    why = (
        f"{waited:.1f} s, and the last load took {took:.1f} s; "
        f"of the server's {loads:.0f} loads {again:.0f} were of models that had made room"
    )
    turn = "more --memory-limit, longer --min-resident-secs, --spare-cores, or loading at the start"
    evidence = {"waited_seconds": waited, "load_seconds": took, "loads": loads, "reloads": again}
    yield TimeClaim(Cause.COLD_START, waited, "requests wait until the model is loaded", why, turn, evidence)


def _idle(seen: ModelInterval) -> Bottleneck:
    refused = seen.grown("charonia_requests_total", outcome="rejected")
    if not (seen.gauge("charonia_model_ready") or seen.whole.has("charonia_on_demand_loads_total")):
        return Bottleneck(Cause.COLD_START, 1.0, "the model does not serve: it is not loaded", "see the log for why")
    why = f", and {refused:.0f} were refused for what they asked" if refused else ""
    return Bottleneck(Cause.IDLE, 1.0, f"nothing limits it: no request was served in {seen.whole.seconds:.1f} s{why}")
