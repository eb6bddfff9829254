"""What a simulated load came to, by tenant, and the smallest fleet that keeps an objective."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from ...bench.load.figures import Spread
from ...core.errors import InvalidArgument
from .simulated_request import SimulatedResult
from .simulation import Simulation

LATENCIES = ("ttft", "itl", "e2e")
STATISTICS = ("mean", "p50", "p90", "p95", "p99", "max")
SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0}
"""The seconds of each unit that a bound on a latency may have."""

_IDLE, _GAIN = 0.3, 0.02
"""Replicas that compute for less of the time are idle enough; what comes nearer by less does not."""


class SimulatedTraffic(msgspec.Struct, frozen=True, kw_only=True):
    """Requests and what they got; latencies are in seconds."""

    requests: int
    rejected: dict[str, int]
    """How many, by what refused them."""
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    ttft: Spread | None
    itl: Spread | None
    """The gaps between tokens."""
    e2e: Spread | None
    """From arrival to last token."""

    @classmethod
    def of(cls, results: Sequence[SimulatedResult], seconds: float) -> "SimulatedTraffic":
        """`seconds`: how long all of them took."""
        served = [result for result in results if result.tokens]
        output = sum(len(result.tokens) for result in served)
        gaps = np.concatenate([np.diff(result.tokens) for result in served]).tolist() if served else []
        return cls(
            requests=len(results),
            rejected=dict(Counter(result.refused for result in results if result.refused).most_common()),
            prompt_tokens=sum(result.arrival.prompt for result in served),
            cached_tokens=sum(result.cached for result in served),
            output_tokens=output,
            output_tokens_per_s=output / seconds if seconds else 0.0,
            ttft=Spread.of([result.ttft for result in served]),
            itl=Spread.of(gaps),
            e2e=Spread.of([result.tokens[-1] - result.arrival.at for result in served]),
        )

    @property
    def rejected_share(self) -> float:
        return sum(self.rejected.values()) / self.requests if self.requests else 0.0


class FleetFigures(msgspec.Struct, frozen=True, kw_only=True):
    """A simulated load in figures."""

    replicas: int
    seconds: float
    """From the first arrival to the last token."""
    busy: float
    """The part of that which replicas computed in, on average."""
    steps: int
    cache_mean: float
    """The part of a replica's cache in use while it computed, on average."""
    cache_most: float
    """The largest part of a replica's cache that was in use."""
    prefix_hit_rate: float
    preemptions: int
    all: SimulatedTraffic
    tenants: dict[str, SimulatedTraffic]
    """The traffic of each of several tenants; empty for one."""


def compute_fleet_figures(simulation: Simulation, results: Sequence[SimulatedResult]) -> FleetFigures:
    """The figures of a simulation that ran once. Each of several tenants has figures of its own."""
    seconds = simulation.now - results[0].arrival.at if results else 0.0
    fleet = simulation.replicas
    tenants = sorted({result.arrival.tenant for result in results})
    blocks = fleet[0].blocks
    busy = simulation.busy
    queries, hits = (
        sum(getattr(replica.scheduler.totals, f"prefix_{name}") for replica in fleet) for name in ("queries", "hits")
    )
    return FleetFigures(
        replicas=len(fleet),
        seconds=seconds,
        busy=busy / (seconds * len(fleet)) if seconds else 0.0,
        steps=sum(replica.steps for replica in fleet),
        cache_mean=sum(replica.held for replica in fleet) / (busy * blocks) if busy else 0.0,
        cache_most=max(replica.most_held for replica in fleet) / blocks,
        prefix_hit_rate=hits / queries if queries else 0.0,
        preemptions=sum(replica.scheduler.totals.preemptions for replica in fleet),
        all=SimulatedTraffic.of(results, seconds),
        tenants={
            name: SimulatedTraffic.of([result for result in results if result.arrival.tenant == name], seconds)
            for name in (tenants if len(tenants) > 1 else ())
        },
    )


class Objective(NamedTuple):
    """A bound: of `metric` ("ttft", "itl" or "e2e") the `statistic` may be `limit` seconds at most; of the metric
    "rejected" `limit` is the share of requests."""

    metric: str
    statistic: str
    limit: float

    @property
    def name(self) -> str:
        return f"{self.metric}_{self.statistic}" if self.statistic else self.metric

    def found_in(self, figures: FleetFigures) -> float:
        if self.metric == "rejected":
            return figures.all.rejected_share
        spread: Spread | None = getattr(figures.all, self.metric)
        return 0.0 if spread is None else float(getattr(spread, self.statistic))


def parse_slo(text: str) -> list[Objective]:
    """Objectives as in `ttft_p95=1s,itl_p99=100ms,rejected=1%`. Where nothing is said of them, none may be rejected.

    Raises:
        InvalidArgument: one is not of that form.
    """
    objectives = [_parse_objective(part.strip()) for part in text.split(",")]
    return (
        objectives
        if any(objective.metric == "rejected" for objective in objectives)
        else [*objectives, Objective("rejected", "", 0.0)]
    )


def _parse_objective(text: str) -> Objective:
    if match := re.fullmatch(r"rejected=(\d*\.?\d+)%", text):
        return Objective("rejected", "", float(match[1]) / 100)
    pattern = rf"({'|'.join(LATENCIES)})_({'|'.join(STATISTICS)})=(\d*\.?\d+)({'|'.join(SECONDS)})"
    if match := re.fullmatch(pattern, text):
        return Objective(match[1], match[2], float(match[3]) * SECONDS[match[4]])
    forms = f"{'|'.join(LATENCIES)}, then _{'|'.join(STATISTICS)}, then a time, as in ttft_p95=1s; or rejected=1%"
    raise InvalidArgument(f"slo: {text!r} is no objective: {forms}", field="slo")


def keeps(figures: FleetFigures, slo: Sequence[Objective]) -> bool:
    return all(objective.found_in(figures) <= objective.limit for objective in slo)


def _gains(before: FleetFigures, after: FleetFigures, slo: Sequence[Objective]) -> bool:
    """Whether an objective that is not kept yet came nearer."""
    missed = [objective for objective in slo if objective.found_in(after) > objective.limit]
    return any(objective.found_in(after) < (1 - _GAIN) * objective.found_in(before) for objective in missed)


def find_fleet(simulate: Callable[[int], FleetFigures], slo: Sequence[Objective], most: int) -> Iterator[FleetFigures]:
    """Every fleet that was tried, the smallest that keeps the objectives among them: twice as many replicas until one
    does, then between the last two. None keeps them where none of the ones tried does: then `most` was tried, or twice
    as many were hardly better than half of them, which had little to do."""
    few = 0
    many = 1
    before: FleetFigures | None = None
    while True:
        yield (figures := simulate(many))
        if keeps(figures, slo):
            break
        if many == most or (before is not None and before.busy < _IDLE and not _gains(before, figures, slo)):
            return
        before = figures
        few, many = many, min(2 * many, most)
    while many - few > 1:
        middle = (few + many) // 2
        yield (figures := simulate(middle))
        few, many = (few, middle) if keeps(figures, slo) else (middle, many)
