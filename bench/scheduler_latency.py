"""The effect of the scheduler's packing on latency, in a simulated time: `python -m charonia.bench.scheduler_latency`.

Nothing is measured: no model computes, and a simulated clock advances by the time of each step on a machine
(`SimulatedMachine`). So figures are exact, the same everywhere, and tests may hold the scheduler to them.
"""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

import numpy as np
from cyclopts import App
from rich.console import Console
from rich.table import Table

from ..engine.core.step_loop import WARM_UP_NEW_TOKENS, WARM_UP_PROMPT_TOKENS
from ..kvcache.manager import KVCacheManager
from ..scheduler.config import SchedulerConfig
from ..scheduler.plan import StepPlan, StepResult
from ..scheduler.prefill_budget import PrefillBudget, StepWork
from ..scheduler.scheduler import Scheduler
from ..scheduler.sequence import SequenceRequest

BLOCK_SIZE = 16

app = App(name="python -m charonia.bench.scheduler_latency", help=__doc__)


class SimulatedMachine(NamedTuple):
    """Seconds of a step: reading the weights or computing with them, whichever is longer; attention; and the rest.

    The defaults are bf16 of Qwen2.5-0.5B's shape on two Zen 4 cores. `products`: measured seconds of all products by
    rows, ascending, in place of `weights` and `token`. `noise`: steps take up to this part longer.
    """

    weights: float = 27.4e-3
    token: float = 1.8e-3
    head: float = 0.7e-3
    decode_context: float = 0.8e-6
    prompt_context: float = 0.3e-6
    rest: float = 2e-3
    noise: float = 0.0
    products: tuple[tuple[int, float], ...] = ()

    def seconds(self, work: StepWork, samples: int) -> float:
        rows = work.decode_tokens + work.prefill_tokens
        computing = self._measured(rows) if self.products else self.token * rows
        attention = self.decode_context * work.decode_context + self.prompt_context * work.prefill_context
        return max(self.weights, computing + self.head * samples) + attention + self.rest

    def _measured(self, rows: int) -> float:
        """Between measurements, and beyond the last two, on a straight line."""
        place = min(max(bisect_left(self.products, (rows,)), 1), len(self.products) - 1)
        (fewer, short), (more, long) = self.products[place - 1 : place + 1]
        return short + (long - short) * (rows - fewer) / (more - fewer)


BF16 = SimulatedMachine()
INT8 = SimulatedMachine(weights=13.7e-3, token=0.9e-3, head=0.35e-3)
INT8_VNNI = SimulatedMachine(
    weights=0.0,
    head=0.0,
    decode_context=0.5e-6,
    products=((1, 18.4e-3), (2, 22.1e-3), (8, 26.0e-3), (16, 30.2e-3), (32, 47.1e-3), (128, 0.105), (512, 0.436)),
)
"""The same shape on two cores of an Intel server processor, without its tiles."""
INT8_TILES = INT8_VNNI._replace(
    products=((1, 18.4e-3), (16, 19.1e-3), (32, 25.5e-3), (64, 32.3e-3), (128, 45.7e-3), (256, 71.4e-3), (512, 0.124))
)
"""The same with tiles (AMX): what a kernel of its own took, by the time of one row; attention is computed as before."""


class SimulatedRequest(NamedTuple):
    """A request of `prompt` tokens that asks for `new` ones at `at` seconds; with targets of its own, in seconds."""

    at: float
    prompt: int
    new: int
    target_ttft: float | None = None
    target_itl: float | None = None


@dataclass(slots=True)
class SimulatedResult:
    """The times of one request's tokens, in seconds from the beginning."""

    arrival: SimulatedRequest
    tokens: list[float] = field(default_factory=list)

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.arrival.at

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between tokens, of those that came from `begin` to `end`."""
        return [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False) if begin < b <= end]


class Simulation:
    """Runs arrivals to their ends. `watch` sees every plan and the seconds it takes. `busy`: seconds of all steps."""

    def __init__(
        self,
        machine: SimulatedMachine,
        config: SchedulerConfig,
        watch: Callable[[StepPlan, float], None] = lambda plan, seconds: None,
        seed: int = 0,
        make_budget: Callable[[SchedulerConfig], PrefillBudget] = PrefillBudget,
    ) -> None:
        self.now = 0.0
        self.busy = 0.0
        self.steps = 0
        self._machine, self._watch, self._random = machine, watch, Random(seed)
        blocks = config.max_num_seqs * (config.max_model_len // BLOCK_SIZE + 1)
        self._cache = KVCacheManager(blocks, BLOCK_SIZE, prefix_caching=False)
        self._scheduler = Scheduler(config, self._cache, make_budget)
        self._decoding: set[int] = set()
        self._warm_up()

    def _warm_up(self) -> None:
        """Run steps as an engine does, from which the scheduler learns their cost."""
        self.run([SimulatedRequest(0.0, WARM_UP_PROMPT_TOKENS, WARM_UP_NEW_TOKENS)])
        self.now, self.busy, self.steps = 0.0, 0.0, 0

    def run(self, arrivals: Iterable[SimulatedRequest]) -> list[SimulatedResult]:
        """The results in the order of arrival."""
        heard = [SimulatedResult(arrival) for arrival in sorted(arrivals, key=lambda each: each.at)]
        coming = list(enumerate(heard))[::-1]
        while coming or self._scheduler.has_work:
            while coming and (coming[-1][1].arrival.at <= self.now or not self._scheduler.has_work):
                key, who = coming.pop()
                self.now = max(self.now, who.arrival.at)
                prompt = np.zeros(who.arrival.prompt, np.int32)
                _, _, new, ttft, itl = who.arrival
                request = SequenceRequest(key=key, prompt=prompt, max_tokens=new, target_ttft=ttft, target_itl=itl)
                self._scheduler.add(request, self.now - who.arrival.at)
            for key in self._step():
                heard[key].tokens.append(self.now)
        return heard

    def _step(self) -> list[int]:
        """Run one step; the sequences that got a token."""
        plan = self._scheduler.schedule()
        assert plan is not None
        seconds = self._machine.seconds(self._work(plan), int(plan.samples.sum()))
        seconds *= 1 + self._machine.noise * self._random.random()
        rows, ends = plan.rows[plan.samples], (plan.starts + plan.counts)[plan.samples]
        result = StepResult(plan.step, rows, ends, np.ones_like(rows), np.zeros_like(rows))
        updates = self._scheduler.apply(result, seconds)
        self._watch(plan, seconds)
        self.now += seconds
        self.busy += seconds
        self.steps += 1
        return updates.keys

    def _work(self, plan: StepPlan) -> StepWork:
        """Rows that sampled before decode, from there on."""
        self._decoding -= {*plan.closed.tolist(), *(new.row for new in plan.new)}
        decoding = np.isin(plan.rows, list(self._decoding))
        context = plan.counts * (plan.starts + plan.counts // 2)
        self._decoding |= set(plan.rows[plan.samples].tolist())
        own, other = plan.counts[decoding], plan.counts[~decoding]
        return StepWork(int(own.sum()), int(context[decoding].sum()), int(other.sum()), int(context[~decoding].sum()))


class PrefillStall(NamedTuple):
    """ITL of running streams in seconds: the median alone, and the 99th percentile beside a long prompt; and that
    prompt's TTFT."""

    alone: float
    beside: float
    ttft: float


def stall(machine: SimulatedMachine, config: SchedulerConfig, streams: int, prompt: int = 2048) -> PrefillStall:
    """`streams` decode; then a long prompt arrives."""
    began = 2 + streams * 0.3
    running = [SimulatedRequest(0.0, 128, 500) for _ in range(streams)]
    heard = Simulation(machine, config).run([*running, SimulatedRequest(began, prompt, 1)])
    late = heard[-1]
    watched = heard[:-1]
    alone = [gap for who in watched for gap in who.gaps(0.8 * began, began)]
    beside = [gap for who in watched for gap in who.gaps(began, late.tokens[0])]
    return PrefillStall(float(np.median(alone)), float(np.percentile(beside, 99)), late.ttft)


class MixedLatency(NamedTuple):
    """Median TTFT of short prompts in seconds, alone and behind long ones; and that of the long ones."""

    alone: float
    behind: float
    long: float


def mixed(machine: SimulatedMachine, config: SchedulerConfig, shorts: int = 12, longs: int = 4) -> MixedLatency:
    """Short prompts arrive one by one; the same again after so many of 2,048 tokens came at once."""
    random = Random(0)
    few = [SimulatedRequest(0.05 + 0.9 * n + random.random(), random.randrange(16, 256), 16) for n in range(shorts)]
    many = [SimulatedRequest(0.0, 2048, 16) for _ in range(longs)]
    alone = Simulation(machine, config).run(few)
    together = Simulation(machine, config).run([*many, *few])
    by_kind = defaultdict[bool, list[float]](list)
    for who in together:
        by_kind[who.arrival.prompt < 256].append(who.ttft)
    return MixedLatency(_median(who.ttft for who in alone), _median(by_kind[True]), _median(by_kind[False]))


def burst(machine: SimulatedMachine, config: SchedulerConfig, sequences: int) -> float:
    """Output tokens a second of sequences with 128 prompt and 64 new tokens, all there at once."""
    simulation = Simulation(machine, config)
    simulation.run([SimulatedRequest(0.0, 128, 64) for _ in range(sequences)])
    return 64 * sequences / simulation.now


def _median(values: Iterable[float]) -> float:
    return float(np.median(list(values)))


@app.default
def main(target_itl_ms: float | None = None, max_num_batched_tokens: int = 512) -> None:
    """Print a table."""
    table = Table("machine", "target ms", "case", "alone ms", "then ms", "ratio", "long TTFT ms", "tok/s")
    for machine, name in ((BF16, "bf16"), (INT8, "int8")):
        for target in (0.0, target_itl_ms):
            config = SchedulerConfig(
                max_model_len=4096, max_num_batched_tokens=max_num_batched_tokens, target_itl_ms=target
            )
            head = name, "auto" if target is None else f"{target:g}"
            for streams in (1, 8, 32):
                figures = _figures(stall(machine, config, streams))
                table.add_row(*head, f"ITL of {streams}; one of 2,048 tokens comes", *figures, "")
            table.add_row(*head, "TTFT under 256 tokens; four of 2,048 before", *_figures(mixed(machine, config)), "")
            for sequences in (4, 16, 32):
                speed = f"{burst(machine, config, sequences):.0f}"
                table.add_row(*head, f"{sequences} of 128 + 64 tokens at once", "", "", "", "", speed)
    Console(width=130).print(table)


def _figures(found: tuple[float, float, float]) -> tuple[str, str, str, str]:
    alone, then, long = found
    return f"{alone * 1e3:.0f}", f"{then * 1e3:.0f}", f"{then / alone:.2f}", f"{long * 1e3:.0f}"


if __name__ == "__main__":
    app()
