"""Where the time of a step goes: `python -m charonia.bench.step_breakdown CHECKPOINT`.

Decode steps of so many sequences taken apart: the layers' matrix products, attention, norms and gates, and the head, as
the C program times them, and what is left (rows, embedding, sampling, Python).
Of all steps the fastest counts, with its parts. `least` is what the machine's limits allow, measured in the same run.
"""

from collections.abc import Iterator
from pathlib import Path
from time import perf_counter
from typing import Annotated, NamedTuple

import numpy as np
from cyclopts import App, Parameter
from rich.table import Table

from ..core.errors import InvalidArgument
from ..engine.checkpoint.hf_checkpoint import open_checkpoint
from ..engine.cpu.op_trace import ATTENTION, GATE, NORM, PRODUCT
from ..engine.cpu.program import ProgramTimings
from ..engine.models.native_decoder import NativeDecoder
from ..processes.host import usable_cores
from .command import Count, report_console, table_of
from .inline_loop import Peer
from .machine_peaks import PeakMeter
from .peer_runner import PeerSetup
from .roofline import MachinePeaks, ModelDemand, OfflineJob, Precision

PARTS = {"products": PRODUCT, "attention": ATTENTION, "norms": NORM, "gates": GATE}

app = App(name="python -m charonia.bench.step_breakdown", help=__doc__)


class StepTimes(NamedTuple):
    """A step of so many tokens: seconds of each part, and of the whole."""

    tokens: int
    parts: dict[str, float]
    whole: float

    @property
    def rest(self) -> float:
        return max(self.whole - sum(self.parts.values()), 0.0)


class FastestSteps:
    """Keeps of all steps with as many tokens the fastest, with its parts as they were in it."""

    def __init__(self) -> None:
        self._best: dict[int, StepTimes] = {}
        self._tokens, self._began = 0, 0.0

    def see(self, run: ProgramTimings) -> None:
        """A step is computed, and the one before was when it began: between lie that one's sampling, and this one."""
        now = perf_counter()
        if self._tokens == run.tokens:
            whole = now - self._began
            if run.tokens not in self._best or whole < self._best[run.tokens].whole:
                self._best[run.tokens] = StepTimes(run.tokens, _parts(run), whole)
        self._tokens, self._began = run.tokens, now

    def steps(self) -> Iterator[StepTimes]:
        """The steps that directly followed another."""
        return (self._best[tokens] for tokens in sorted(self._best))


def _parts(run: ProgramTimings) -> dict[str, float]:
    heads = (run.kinds == PRODUCT) & run.selected
    parts = {name: float(run.seconds[(run.kinds == kind) & ~heads].sum()) for name, kind in PARTS.items()}
    return {**parts, "head": float(run.seconds[heads].sum())}


@app.default
def main(
    checkpoint: Path,
    *,
    precision: Precision = "int8",
    sequences: Annotated[tuple[int, ...], Parameter(consume_multiple=True)] = (1, 4, 16, 32),
    prompt: Count = 128,
    new: Count = 32,
    tries: Count = 3,
) -> None:
    """Take steps apart.

    Args:
        checkpoint: Of an architecture of ours, dense.
        precision: What to compute with.
        sequences: That run at once; one line each.
        prompt: Tokens of each sequence's prompt.
        new: Tokens that each generates.
        tries: Runs of each number of sequences.
    """
    threads = usable_cores().threads
    demand = ModelDemand.of(open_checkpoint(str(checkpoint)).spec, precision)
    machine = PeakMeter([precision], "cpu", threads).measure()[precision]
    table = _table(precision, threads, machine)
    for count in sequences:
        setup = PeerSetup(str(checkpoint), precision, count, prompt + new, 512, threads, "cpu", "")
        step = _decode(Peer(setup), OfflineJob(count, prompt, new), tries)
        _row(table, step, _least(demand, OfflineJob(count, prompt, new), machine))
    report_console().print(table)


def _decode(peer: Peer, job: OfflineJob, tries: int) -> StepTimes:
    """Raises InvalidArgument: the layers run as no program here, or no step followed another."""
    watch, random = FastestSteps(), np.random.default_rng(0)
    decoder = peer.executor.rank.runner.computer.decoder
    if isinstance(decoder, NativeDecoder):
        decoder.timing_listener = watch.see
    for _ in range(tries):
        peer.generate(random.integers(1, 60, (job.sequences, job.prompt)).tolist(), job.new)
    for step in watch.steps():
        if step.tokens == job.sequences:
            return step
    raise InvalidArgument("no decode step was timed: its layers are not run by the C kernels as one program")


def _least(demand: ModelDemand, job: OfflineJob, machine: MachinePeaks) -> float:
    """Seconds of a decode step in the middle of the job."""
    read = demand.weight_bytes + job.sequences * demand.context_bytes(job.prompt + job.new // 2)
    return max(read / machine.read, demand.decode_ops(job) / machine.peak)


def _table(precision: Precision, threads: int, machine: MachinePeaks) -> Table:
    said = f"{precision}, {threads} threads; {machine.read / 1e9:.1f} GB/s, {machine.peak / 1e9:.0f} GOP/s"
    columns = ("sequences", "least", "step", *PARTS, "head", "rest")
    return table_of((), columns, f"ms of a decode step: {said}")


def _row(table: Table, step: StepTimes, least: float) -> None:
    seconds = (least, step.whole, *step.parts.values(), step.rest)
    table.add_row(str(step.tokens), *(f"{1000 * part:.2f}" for part in seconds))


if __name__ == "__main__":
    app()
