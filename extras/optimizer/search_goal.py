"""The goal of a search: what configurations are measured by, the metric to better, and bounds on others.

Knows nothing of servers: a trial's figures come from whoever measured.
"""

import math
import re
from collections.abc import Iterable, Sequence
from statistics import median
from typing import NamedTuple, TypeAlias

import msgspec

from ...bench.load.figures import Spread
from ...core.errors import InvalidArgument
from .fleet_figures import LATENCIES, SECONDS, STATISTICS

ParameterValue: TypeAlias = int | float | str
Configuration: TypeAlias = tuple[ParameterValue, ...]
"""A value for each parameter of a search space, in the order of the parameters."""

_PLAIN = ("throughput", "memory", "failed")
METRICS = (*_PLAIN, *(f"{latency}_{statistic}" for latency in LATENCIES for statistic in STATISTICS))
_BYTES = {"MB": 1e6, "GB": 1e9, "MiB": 2.0**20, "GiB": 2.0**30}
_NUMBER = r"(\d*\.?\d+)"
_FORMS = (
    "as in e2e_p99=20ms, ttft_p95=1s, itl_p99=100ms, memory=2GiB, throughput=100 (at least), or failed=1%; "
    f"latencies are {', '.join(LATENCIES)} with {', '.join(STATISTICS)}"
)
_VIOLATION_WEIGHT = 5.0
"""What a bound that is missed by a share costs, in shares of the objective: enough that none pays for the other."""


class LevelFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration under one level of load. Latencies are in seconds."""

    level: str
    """Its name."""
    requests: int
    throughput: float
    """Inferences or output tokens a second."""
    failed: float = 0.0
    """The share of requests."""
    memory: float | None = None
    """Bytes of all processes at the most, where that is known."""
    e2e: Spread | None = None
    """The times of whole requests."""
    ttft: Spread | None = None
    itl: Spread | None = None
    generator: float = 0.0
    """The part of a core that the load generator took."""

    def metric(self, name: str) -> float | None:
        """The value of one of `METRICS`; None where there is none."""
        if name in _PLAIN:
            plain: float | None = getattr(self, name)
            return plain
        latency, _, statistic = name.partition("_")
        spread: Spread | None = getattr(self, latency)
        return None if spread is None else float(getattr(spread, statistic))


class ConfigurationTrial(msgspec.Struct, frozen=True, kw_only=True):
    """One measurement of a configuration, under one level of load after the other. `seconds`: of load at each level, as
    asked for; `setup`, `loading`: seconds that it took until the models were loaded, and under load. `failure`: why
    there are no figures."""

    configuration: Configuration
    seconds: float
    setup: float
    loading: float = 0.0
    levels: tuple[LevelFigures, ...] = ()
    failure: str = ""

    @property
    def wall(self) -> float:
        return self.setup + self.loading


def expected_wall(trials: Sequence[ConfigurationTrial], seconds: float, levels: int = 1) -> float:
    """What a measurement under so many seconds of load at each level takes, by those there were: beside its load each
    starts, and waits for the last answers, however long the load was. `levels`: of the first."""
    loads = [trial for trial in trials if trial.loading]
    setup = median(trial.setup for trial in trials) if trials else 0.0
    if not loads:
        return setup + levels * seconds
    beside = median(trial.loading - len(trial.levels) * trial.seconds for trial in loads)
    return setup + median(len(trial.levels) for trial in loads) * seconds + beside


class Bound(NamedTuple):
    """A constraint: `metric` may be `limit` at most, or if `at_least`, at least."""

    metric: str
    limit: float
    at_least: bool = False

    def excess(self, figures: LevelFigures) -> float:
        """By what share of the limit it is missed: 0 where it is kept, infinite where there is no such figure."""
        value = figures.metric(self.metric)
        if value is None:
            return math.inf
        over, under = (self.limit, value) if self.at_least else (value, self.limit)
        if over <= under:
            return 0.0
        return over / under - 1 if under else 10 * over

    def __str__(self) -> str:
        sign = "at least" if self.at_least else "at most"
        return f"{self.metric} {sign} {format_metric(self.metric, self.limit)}"


class LevelScore(NamedTuple):
    """A trial in one number. `level`: the figures that count, `value` the objective's there; `excess`: by what bounds
    are missed there, 0 where all are kept."""

    level: LevelFigures
    value: float
    excess: float

    @property
    def feasible(self) -> bool:
        return self.excess == 0


class SearchGoal(msgspec.Struct, frozen=True):
    """The `objective` is one of `METRICS`: throughput as high, all others as low as can be."""

    objective: str = "throughput"
    bounds: tuple[Bound, ...] = (Bound("failed", 0.0),)

    @property
    def maximises(self) -> bool:
        return self.objective == "throughput"

    def score(self, trial: ConfigurationTrial) -> LevelScore | None:
        """The score of a trial, by the level at which the configuration does best within the bounds, or misses them by
        the least; None where there is no figure."""
        scores = [score for level in trial.levels if (score := self._score_level(level)) is not None]
        return max(scores, key=lambda score: (-score.excess, self.utility(score)), default=None)

    def _score_level(self, level: LevelFigures) -> LevelScore | None:
        value = level.metric(self.objective)
        if value is None or not math.isfinite(value) or value <= 0:
            return None
        return LevelScore(level, value, min(10.0, sum(bound.excess(level) for bound in self.bounds)))

    def utility(self, score: LevelScore) -> float:
        """The logarithm of the objective, larger for what is better, less what missed bounds cost."""
        gain = math.log(score.value) if self.maximises else -math.log(score.value)
        return gain - _VIOLATION_WEIGHT * math.log1p(score.excess)

    def ends_levels(self, level: LevelFigures) -> bool:
        """Whether a higher level of load cannot keep the bounds either: more load lowers no latency."""
        return any(bound.excess(level) > 0 for bound in self.bounds if not bound.at_least and bound.metric != "memory")

    def missed(self, level: LevelFigures) -> list[Bound]:
        return [bound for bound in self.bounds if bound.excess(level) > 0]


def parse_goal(objective: str, constraints: Iterable[str], *, streams: bool) -> SearchGoal:
    """A goal as the command line says it; `streams`: answers are streams of tokens. Where nothing is said of requests
    that fail, none may.

    Raises:
        InvalidArgument: an unknown metric, a bound of another form, or times of tokens where there are none.
    """
    if objective not in METRICS or objective == "failed":
        known = ", ".join(name for name in METRICS if name != "failed")
        raise InvalidArgument(f"objective: '{objective}' is none of {known}", field="objective")
    texts = [text.strip() for constraint in constraints for text in constraint.split(",") if text.strip()]
    bounds = [_parse_bound(text) for text in texts]
    for name in (objective, *(bound.metric for bound in bounds)):
        if not streams and name.partition("_")[0] in ("ttft", "itl"):
            raise InvalidArgument(f"{name}: the model's answers are no streams of tokens; e2e is the whole request's")
    if all(bound.metric != "failed" for bound in bounds):
        bounds.append(Bound("failed", 0.0))
    return SearchGoal(objective, tuple(bounds))


def _parse_bound(text: str) -> Bound:
    if match := re.fullmatch(rf"failed={_NUMBER}%", text):
        return Bound("failed", float(match[1]) / 100)
    if match := re.fullmatch(rf"throughput={_NUMBER}", text):
        return Bound("throughput", float(match[1]), at_least=True)
    if match := re.fullmatch(rf"memory={_NUMBER}({'|'.join(_BYTES)})", text):
        return Bound("memory", float(match[1]) * _BYTES[match[2]])
    pattern = rf"(({'|'.join(LATENCIES)})_({'|'.join(STATISTICS)}))={_NUMBER}({'|'.join(SECONDS)})"
    if match := re.fullmatch(pattern, text):
        return Bound(match[1], float(match[4]) * SECONDS[match[5]])
    raise InvalidArgument(f"constraint: '{text}' is of no form that is known: {_FORMS}", field="constraint")


def format_metric(name: str, value: float) -> str:
    """A value with its unit."""
    if name == "memory":
        return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"
    if name == "failed":
        return f"{value:.1%}"
    if name == "throughput":
        return f"{value:.0f}/s" if value >= 100 else f"{value:.1f}/s"
    return f"{value:.2f} s" if value >= 10 else f"{value * 1e3:.1f} ms" if value < 1 else f"{value:.3f} s"
