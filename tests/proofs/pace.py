"""What a pace that sees the line does to latency: `python -m tests.proofs.pace --traces DIR`.

The real scheduler runs requests of two traces on simulated machines, with the policy of today and with the one before,
at loads below and above what the machines can do; no model computes. DIR has azure_conversation_2023.csv and
azure_code_2023.csv, with the columns of `charonia.bench.serve --trace`; without it, requests are drawn that are much
like theirs. Exits with 1 where a long prompt beside streams waits too long or holds them up too long.
"""

import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from cyclopts import App
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from charonia.bench.load.planned_requests import read_trace
from charonia.extras.optimizer.simulated_machine import SimulatedMachine
from charonia.extras.optimizer.simulated_request import SimulatedRequest
from charonia.extras.optimizer.simulation import MakeBudget, Simulation, unlimited_engine
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.plan import StepWork
from charonia.scheduler.prefill_budget import IDLE_STEP_SECONDS, PrefillBudget, PrefillLane, StepDemand, StepPace

from .scheduler_latency import INT8, INT8_TILES, INT8_VNNI

MACHINES = {"Zen 4": INT8, "VNNI": INT8_VNNI, "tiles": INT8_TILES}
TRACES = ("conversation", "code")
LOADS = (0.5, 0.8, 1.2)
FILL = 0.8
"""Part of the time that steps take with the policy before, at one more load."""

MOST_DELAY, MOST_STALL = 1.9, 2.5
"""A prompt of 2,000 tokens beside four streams: its TTFT over alone, and their p99 gap over their median without it."""

PACED = unlimited_engine(SchedulerConfig(max_model_len=8192))
UNBOUNDED = unlimited_engine(SchedulerConfig(max_model_len=8192, target_itl_ms=0))


app = App(name="python -m tests.proofs.pace", help=__doc__)


_LONG_PROMPT_SECONDS, _LONG_PROMPT_SLOWDOWN = 0.5, 1.6
_SHORT_PROMPT_STEP_SECONDS = 0.25


class FormerPace(StepPace):
    """What `StepPace` is compared with: the queue is not seen. Short prompts make a step a quarter of a second
    long; long ones 1.6 times what it is without them."""

    def short_prompt_lane(self, tokens: int) -> PrefillLane:
        decoding = self.demand.decoding
        assert self.model is not None
        alone = self.model.step_seconds(decoding)
        least = (_LONG_PROMPT_SLOWDOWN - 1) * alone if decoding.decode_tokens else 0.0
        return PrefillLane(self.model, tokens, max(_SHORT_PROMPT_STEP_SECONDS - alone, least))

    def long_prompt_lane(self, work: StepWork, tokens: int) -> PrefillLane:
        others = self.demand.decoding if self.demand.decoding.decode_tokens else work
        assert self.model is not None
        alone = self.model.step_seconds(others)
        idle = not (others.decode_tokens or others.prefill_tokens)
        seconds = IDLE_STEP_SECONDS - alone if idle else (_LONG_PROMPT_SLOWDOWN - 1) * alone
        return PrefillLane(self.model, tokens, seconds)


class FormerBudget(PrefillBudget):
    def is_long_prompt(self, tokens: int, context: int, calm: bool = False) -> bool:
        return self.bound is not None and self.bound.prompt_seconds(tokens, context) > _LONG_PROMPT_SECONDS

    def pace(self, demand: StepDemand) -> StepPace:
        return super().pace(demand) if self.bound is None else FormerPace(self.bound, demand)


POLICIES: dict[str, MakeBudget] = {"before": FormerBudget, "now": PrefillBudget}


class PacedRun(NamedTuple):
    """Milliseconds of all requests: (p50, p90, p99) of TTFT and of ITL, and the median of whole requests. `fill`: the
    part of the time that steps took."""

    ttft: tuple[float, float, float]
    itl: tuple[float, float, float]
    whole: float
    fill: float


def run(machine: SimulatedMachine, requests: Sequence[SimulatedRequest], make_budget: MakeBudget) -> PacedRun:
    simulation = Simulation(machine, PACED, make_budget=make_budget)
    heard = simulation.run(requests)
    gaps = np.concatenate([np.diff(each.tokens) for each in heard])
    whole = float(np.median([each.tokens[-1] - each.arrival.at for each in heard]))
    ttft = _percentiles([each.ttft for each in heard])
    return PacedRun(ttft, _percentiles(gaps), 1e3 * whole, simulation.busy / simulation.now)


def _percentiles(seconds: Sequence[float] | np.ndarray) -> tuple[float, float, float]:
    p50, p90, p99 = (1e3 * np.percentile(seconds, (50, 90, 99))).tolist()
    return p50, p90, p99


def sped_up(requests: Sequence[SimulatedRequest], factor: float) -> list[SimulatedRequest]:
    return [request._replace(at=request.at / factor) for request in requests]


def capacity(machine: SimulatedMachine, requests: Sequence[SimulatedRequest]) -> float:
    """The speed-up at which requests come as fast as the machine can answer them if all are there at once."""
    simulation = Simulation(machine, UNBOUNDED)
    simulation.run([request._replace(at=0.0) for request in requests])
    return requests[-1].at / simulation.now


def filling(machine: SimulatedMachine, requests: Sequence[SimulatedRequest], fill: float = FILL) -> float:
    """The speed-up at which steps take this part of the time, with the policy before."""
    low, high = 1e-3, 10.0
    for _ in range(9):
        middle = float(np.sqrt(low * high))
        if run(machine, sped_up(requests, middle), FormerBudget).fill < fill:
            low = middle
        else:
            high = middle
    return low


class PacedPrompt(NamedTuple):
    """A long prompt beside streams: its TTFT over alone, and their p99 gap meanwhile over their median before."""

    delay: float
    stall: float


def beside_streams(
    machine: SimulatedMachine, make_budget: MakeBudget = PrefillBudget, prompt: int = 2000, streams: int = 4
) -> PacedPrompt:
    """Streams that run ten times as long as the prompt's computation or so; the prompt comes when they decode."""
    [alone] = Simulation(machine, PACED, make_budget=make_budget).run([SimulatedRequest(0.0, prompt, 1)])
    began = 4.0
    running = [SimulatedRequest(0.0, 128, 900) for _ in range(streams)]
    simulation = Simulation(machine, PACED, make_budget=make_budget)
    *watched, late = simulation.run([*running, SimulatedRequest(began, prompt, 1)])
    before = [gap for each in watched for gap in each.gaps(began / 2, began)]
    beside = [gap for each in watched for gap in each.gaps(began, late.tokens[0])]
    return PacedPrompt(late.ttft / alone.ttft, float(np.percentile(beside, 99) / np.median(before)))


def load_requests(name: str, traces: Path | None, count: int, longest: int) -> list[SimulatedRequest]:
    """The first `count` requests of a trace, or drawn ones; no request is longer than `longest` tokens."""
    if traces is None:
        return drawn(name, count, longest)
    jobs = read_trace(traces / f"azure_{name}_2023.csv", limit=count, longest=longest)
    return [SimulatedRequest(job.due, job.prompt, job.new) for job in jobs]


def drawn(name: str, count: int, longest: int) -> list[SimulatedRequest]:
    """Requests with about the medians and spreads of the trace; those of "code" come in bursts."""
    random = np.random.default_rng(18)
    prompt, new, burst = ((1020, 0.9), (130, 0.8), 1) if name == "conversation" else ((1470, 1.1), (13, 1.0), 40)
    prompts, outputs = (random.lognormal(np.log(median), spread, count) for median, spread in (prompt, new))
    times = np.cumsum(random.exponential(0.2, count) * np.where(np.arange(count) % burst, 1, burst))
    sizes = zip((times - times[0]).tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    limited = ((at, prompt, min(int(new) + 1, longest // 2)) for at, prompt, new in sizes)
    return [SimulatedRequest(at, min(int(prompt) + 1, longest - new), new) for at, prompt, new in limited]


def loads(machine: SimulatedMachine, requests: Sequence[SimulatedRequest]) -> Iterator[tuple[str, float]]:
    """The name and the speed-up of each load."""
    yield f"steps fill {FILL:.0%}", filling(machine, requests)
    most = capacity(machine, requests)
    yield from ((f"{load} of capacity", load * most) for load in LOADS)


@app.default
def main(traces: Path | None = None, requests: int = 100, longest: int = 2048, machines: tuple[str, ...] = ()) -> int:
    """Print both tables.

    Parameters
    ----------
    requests
        How many of each trace.
    longest
        Prompts are cut so that no request is longer, in tokens.
    machines
        Some of "Zen 4", VNNI and tiles; unset: all.
    """
    console = Console(width=150, highlight=False)
    chosen = {name: MACHINES[name] for name in machines or MACHINES}
    kept = _print_prompts(console, chosen)
    head = (
        "trace",
        "machine",
        "load",
        "policy",
        "TTFT p50 / p90 / p99 ms",
        "ITL p50 / p90 / p99 ms",
        "whole p50 ms",
        "fill",
    )
    table = Table(*head, "TTFT p90, ITL p99: now over before")
    with Progress(console=console) as progress:
        task = progress.add_task("loads of traces", total=len(TRACES) * len(chosen) * (1 + len(LOADS)))
        for trace in TRACES:
            asked = load_requests(trace, traces, requests, longest)
            for name, machine in chosen.items():
                for load, factor in loads(machine, asked):
                    runs = {policy: run(machine, sped_up(asked, factor), make) for policy, make in POLICIES.items()}
                    for policy, each in runs.items():
                        ratios = _ratios(each, runs["before"]) if policy == "now" else ""
                        times = _joined(each.ttft), _joined(each.itl), f"{each.whole:.0f}", f"{each.fill:.2f}"
                        table.add_row(trace, name, load, policy, *times, ratios)
                    progress.advance(task)
    console.print(table)
    return 0 if kept else 1


def _print_prompts(console: Console, machines: dict[str, SimulatedMachine]) -> bool:
    """Whether no prompt beside streams took too long, nor held them up too long."""
    table = Table("machine", "policy", "2,000 tokens beside 4 streams: TTFT over alone", "their p99 gap over median")
    kept = True
    for name, machine in machines.items():
        for policy, make in POLICIES.items():
            found = beside_streams(machine, make)
            table.add_row(name, policy, f"{found.delay:.2f}", f"{found.stall:.2f}")
            if policy == "now":
                kept &= found.delay <= MOST_DELAY and found.stall <= MOST_STALL
    console.print(table)
    return kept


def _ratios(now: PacedRun, before: PacedRun) -> str:
    return f"{now.ttft[1] / before.ttft[1]:.2f}  {now.itl[2] / before.itl[2]:.2f}"


def _joined(milliseconds: tuple[float, float, float]) -> str:
    return " / ".join(f"{each:,.0f}" for each in milliseconds)


if __name__ == "__main__":
    sys.exit(app())
