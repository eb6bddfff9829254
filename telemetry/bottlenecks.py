"""Explains what limits each model: the time of its requests between two scrapes, charged to causes. Each second goes to
the most specific cause that explains it, by the rules in docs/explain.md."""

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import NamedTuple

import msgspec

from .cache_accounts import CacheAccount, cache_accounts
from .classic_claims import classic_claims
from .llm_claims import llm_claims
from .roofline import StepRoofline
from .scrape import Interval, ModelInterval
from .time_claims import Cause, TimeClaim, percent

_SATURATED = 0.9
"""The busy part of an event loop's thread from which on everything else waits for it."""

_LATE = 0.02
"""The mean delay of an event loop, in seconds, from which on unread tokens are charged to it."""

_LEAST_SHARE = 0.01
"""Causes with a smaller share are left out."""


class Bottleneck(msgspec.Struct, frozen=True):
    """What limits a model, in a sentence with its evidence."""

    cause: Cause
    share: float
    """The part of its requests' time, 0 to 1."""
    text: str
    turn: str = ""
    """The flag or setting to change, or what else to do."""
    evidence: Mapping[str, float] = {}
    """The evidence in numbers."""


class ModelReport(msgspec.Struct, frozen=True):
    """The bottlenecks of one version of a model over the last `seconds`, the worst first."""

    model: str
    version: str
    seconds: float
    since_start: bool
    """Whether the seconds reach back to the server's start."""
    bottlenecks: tuple[Bottleneck, ...]
    cache: tuple[CacheAccount, ...] = ()
    """What there is to tell of a language model's prefix cache."""


class LoopFigures(NamedTuple):
    """An event loop's mean delay and longest lag, in seconds, and the busy part of its thread's time. `frontend` is
    empty for the loop of the server's own process."""

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
    """The event loops that a request passes: the server's own and, with several frontends, that of one of these."""

    own: LoopFigures
    frontends: tuple[LoopFigures, ...]
    setting: str = ""
    """The flag --frontends; empty in a scrape that does not tell."""
    taking: int = 1
    """The processes that take requests."""
    auto: int = 1
    """As many as --frontends auto has at most."""

    @classmethod
    def of(cls, interval: Interval) -> "ServerLoops":
        family = "charonia_event_loop_delay_seconds"
        probes, sums = (interval.grown_by(f"{family}_{part}", "frontend") for part in ("count", "sum"))
        computed = interval.grown_by("charonia_event_loop_cpu_seconds_total", "frontend")
        lags = interval.last_by("charonia_event_loop_lag_seconds", "frontend")

        def figures(name: str) -> LoopFigures:
            delay = sums.get(name, 0.0) / probes[name] if probes.get(name) else 0.0
            return LoopFigures(name, delay, lags.get(name, 0.0), min(computed.get(name, 0.0) / interval.seconds, 1.0))

        loops = figures(""), tuple(figures(name) for name in sorted(lags) if name)
        settings = interval.last_by("charonia_frontends", "setting")
        for setting, count in settings.items():
            return cls(*loops, setting, int(count), int(interval.gauge("charonia_frontends_auto")))
        return cls(*loops)

    @property
    def more_frontends(self) -> str:
        """The way to more processes that take requests, by the flag as it is; empty if there is none."""
        if self.setting == "":
            return "more --frontends"
        if self.setting == "auto" and self.auto > 1:
            has = f"--frontends auto has {self.taking} of at most {self.auto}"
            if self.taking == self.auto:
                return f"{has}, a number may be larger"
            when = "the log says why it has no more" if self.own.saturated else "it has more when this loop is busy"
            return f"{has}, {when}, --frontends {self.auto} has them from the start"
        if self.taking < self.auto:
            return f"--frontends auto, which has up to {self.auto} here, in place of {self.setting}"
        return "more --frontends, if cores are free" if self.taking > 1 else ""

    @property
    def delay(self) -> float:
        """The mean delay of a request that passes."""
        return self.own.delay + (fmean(loop.delay for loop in self.frontends) if self.frontends else 0.0)

    @property
    def saturated(self) -> float:
        """The part of the time for which saturated loops computed. Connections are spread evenly over the frontends."""
        own, *frontends = (loop.busy if loop.saturated else 0.0 for loop in (self.own, *self.frontends))
        return max(own, fmean(frontends) if frontends else 0.0)

    @property
    def late(self) -> bool:
        return any(loop.late for loop in (self.own, *self.frontends))

    @property
    def worst(self) -> LoopFigures:
        loops = self.own, *self.frontends
        saturated = [loop for loop in loops if loop.saturated]
        return max(saturated, key=lambda loop: loop.busy) if saturated else max(loops, key=lambda loop: loop.delay)


def explain(interval: Interval, rooflines: Mapping[str, StepRoofline] = {}, model: str = "") -> list[ModelReport]:
    """A report of each version of each model, or of one model. `rooflines` are those of language models by name;
    without one, memory bandwidth and arithmetic are not distinguished."""
    loops = ServerLoops.of(interval)
    models = [model_id for model_id in interval.models() if model in ("", model_id.name)]
    return [_explain_model(ModelInterval(interval, model_id), loops, rooflines) for model_id in models]


def is_language_model(interval: ModelInterval) -> bool:
    return bool(interval.last_by("charonia_tenant_weight", "tenant"))


def _explain_model(interval: ModelInterval, loops: ServerLoops, rooflines: Mapping[str, StepRoofline]) -> ModelReport:
    model = interval.model
    claims = [_loop_claim(interval, loops), *_cold_start_claims(interval)]
    accounts: tuple[CacheAccount, ...] = ()
    if is_language_model(interval):
        accounts = tuple(cache_accounts(interval))
        claims += llm_claims(interval, loops.late, rooflines.get(model.name))
    else:
        claims += classic_claims(interval)
    bottlenecks = tuple(_bottlenecks(claims, loops.saturated)) or (_idle(interval),)
    whole = interval.whole
    return ModelReport(model.name, model.version, whole.seconds, whole.since_start, bottlenecks, accounts)


def _bottlenecks(claims: list[TimeClaim], saturated: float) -> Iterator[Bottleneck]:
    """The claims as shares of all time, one for each cause, described by its largest claim. `saturated` is the part of
    the time that loops were saturated."""
    total = sum(claim.seconds for claim in claims)
    if total <= 0:
        return
    shares: dict[Cause, float] = {}
    for claim in sorted(claims, key=lambda claim: -claim.seconds):
        shares[claim.cause] = shares.get(claim.cause, 0.0) + claim.seconds / total
    if saturated:
        own = max(shares.get(Cause.FRONTEND, 0.0), saturated)
        others = 1 - shares.get(Cause.FRONTEND, 0.0)
        shares = {cause: share * (1 - own) / others if others else 0.0 for cause, share in shares.items()}
        shares[Cause.FRONTEND] = own
    for cause in sorted(shares, key=lambda cause: -shares[cause]):
        share = shares[cause]
        largest = max((claim for claim in claims if claim.cause is cause), key=lambda claim: claim.seconds)
        if share >= _LEAST_SHARE:
            why = f": {largest.why}" if largest.why else ""
            text = f"{largest.symptom}, {percent(share)} of the requests' time{why}"
            yield Bottleneck(cause, share, text, largest.turn, largest.evidence)


_LOG = "the log names what holds the loop for long"


def _loop_claim(interval: ModelInterval, loops: ServerLoops) -> TimeClaim:
    """The delays of a request, which passes each of its loops twice: on arrival and with its answer. The worst loop is
    described."""
    ended = interval.grown("charonia_requests_total")
    loop = loops.worst
    name, symptom = "the event loop", "requests wait for the frontend's event loop"
    more = f"{loops.more_frontends}; " if loops.more_frontends else ""
    turn = f"{_LOG}; {more}fewer and larger requests, binary tensors, or another server"
    evidence = {"loop_busy": loop.busy, "loop_delay_seconds": loop.delay, "loop_lag_seconds": loop.lag}
    if loop.frontend:
        name = f"that of frontend {loop.frontend}"
        symptom = "requests wait for a frontend's event loop"
        turn = f"{_LOG}; more connections, of which each stays with one frontend; {more}binary tensors"
    elif loops.frontends:
        name, symptom = "it", "requests wait for the hub's event loop"
        turn = f"{_LOG}; fewer and larger requests, or another server: there is one hub, whatever --frontends says"
        if loops.setting == "auto":
            turn += "; clients whose connections are older than its frontends may connect again"
    why = (
        f"{name} computes {percent(loop.busy)} of the time, and is late by {1e3 * loop.delay:.1f} ms "
        f"in the mean, by {1e3 * loop.lag:.0f} ms at most"
    )
    return TimeClaim(Cause.FRONTEND, 2 * loops.delay * ended, symptom, why, turn, evidence)


def _cold_start_claims(interval: ModelInterval) -> Iterator[TimeClaim]:
    waited = interval.whole.grown("charonia_load_wait_seconds_total", model=interval.model.name)
    if not waited:
        return
    loads = interval.whole.grown("charonia_on_demand_loads_total")
    reloads = interval.whole.grown("charonia_on_demand_reloads_total")
    load_seconds = sum(interval.last_by("nv_model_load_duration_secs", "version").values())
    why = (
        f"{waited:.1f} s, and the last load took {load_seconds:.1f} s; "
        f"of the server's {loads:.0f} loads {reloads:.0f} were of models that had made room"
    )
    turn = "more --memory-limit, longer --min-resident-secs, --spare-cores, or loading at the start"
    evidence = {"waited_seconds": waited, "load_seconds": load_seconds, "loads": loads, "reloads": reloads}
    yield TimeClaim(Cause.COLD_START, waited, "requests wait until the model is loaded", why, turn, evidence)


def _idle(interval: ModelInterval) -> Bottleneck:
    refused = interval.grown("charonia_requests_total", outcome="rejected")
    if not (interval.gauge("charonia_model_ready") or interval.whole.has("charonia_on_demand_loads_total")):
        return Bottleneck(Cause.COLD_START, 1.0, "the model does not serve: it is not loaded", "see the log for why")
    why = f", and {refused:.0f} were refused for what they asked" if refused else ""
    text = f"nothing limits it: no request was served in {interval.whole.seconds:.1f} s{why}"
    return Bottleneck(Cause.IDLE, 1.0, text)
