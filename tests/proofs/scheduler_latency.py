"""The effect of the scheduler's packing on latency, in a simulated time: `python -m tests.proofs.scheduler_latency`.

Nothing is measured: no model computes, and a simulated clock advances by the time of each step on a machine
(`SimulatedMachine`). So figures are exact, the same everywhere, and tests may hold the scheduler to them.
"""

from collections import defaultdict
from collections.abc import Iterable
from random import Random
from typing import NamedTuple

import numpy as np
from cyclopts import App
from msgspec.structs import replace
from rich.console import Console
from rich.table import Table

from charonia.extras.optimizer.simulated_machine import SimulatedMachine
from charonia.extras.optimizer.simulated_request import SimulatedRequest
from charonia.extras.optimizer.simulation import Simulation, unlimited_engine
from charonia.scheduler.config import SchedulerConfig

app = App(name="python -m tests.proofs.scheduler_latency", help=__doc__)


BF16 = SimulatedMachine()
INT8 = SimulatedMachine(weights=13.7e-3, token=0.9e-3, head=0.35e-3)
INT8_VNNI = SimulatedMachine(
    weights=0.0,
    head=0.0,
    decode_context=0.5e-6,
    products=((1, 18.4e-3), (2, 22.1e-3), (8, 26.0e-3), (16, 30.2e-3), (32, 47.1e-3), (128, 0.105), (512, 0.436)),
)
"""The same shape on two cores of an Intel server processor, without its tiles."""
INT8_TILES = replace(
    INT8_VNNI,
    products=((1, 18.4e-3), (16, 19.1e-3), (32, 25.5e-3), (64, 32.3e-3), (128, 45.7e-3), (256, 71.4e-3), (512, 0.124)),
)
"""The same with tiles (AMX): what a kernel of its own took, by the time of one row; attention is computed as before."""


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
    heard = Simulation(machine, unlimited_engine(config)).run([*running, SimulatedRequest(began, prompt, 1)])
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
    alone = Simulation(machine, unlimited_engine(config)).run(few)
    together = Simulation(machine, unlimited_engine(config)).run([*many, *few])
    by_kind = defaultdict[bool, list[float]](list)
    for who in together:
        by_kind[who.arrival.prompt < 256].append(who.ttft)
    return MixedLatency(_median(who.ttft for who in alone), _median(by_kind[True]), _median(by_kind[False]))


def burst(machine: SimulatedMachine, config: SchedulerConfig, sequences: int) -> float:
    """Output tokens a second of sequences with 128 prompt and 64 new tokens, all there at once."""
    simulation = Simulation(machine, unlimited_engine(config))
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
