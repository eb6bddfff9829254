"""A simulated server beside the real one: `python -m tests.proofs.simulation --traces DIR --scratch DIR`.

Calibrates the machine, then puts both traces to a real server at half, four fifths and one and a fifth of its capacity,
each twice, and simulates the same requests. Capacity is the simulated output rate while the queue is never empty. DIR
of --traces has azure_conversation_2023.csv and azure_code_2023.csv. What is measured is kept in --scratch: started
again, it goes on; without machine.json it calibrates again, and judges the runs that there are by that. Whole it takes
one and a half to two hours; `--seconds 60 --loads 0.8` is a short one. Exits with 1 where a figure is off by more than
its bound: 5 % of throughput and of ITL's median, 10 % of the others or 1.5 times what the two runs differ by; of a TTFT
beyond capacity also what steps do to it that take 2 % longer or less.
"""

import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec
import numpy as np
from cyclopts import App, Parameter
from rich.console import Console
from rich.table import Table

from charonia.bench.checkpoint import ShapeName, prepare_checkpoint
from charonia.bench.command import Count, Log, Positive, exit_on_error, log_to, run_command, table_of
from charonia.bench.load.driver import OK, LoadRecord, LoopMode, RequestOptions
from charonia.bench.load.plan import Prompts
from charonia.bench.load.planned_requests import PlannedRequest, due_within, read_trace
from charonia.bench.load.worker import LoadRun, LoadTarget
from charonia.bench.load.worker import run as put_load
from charonia.bench.server_process import first_model, own_server
from charonia.core.errors import Unavailable
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint
from charonia.engine.checkpoint.model_spec import CheckpointError
from charonia.extras.optimizer.machine_file import MachineFile, read_machine_file
from charonia.extras.optimizer.simulated_machine import SimulatedMachine
from charonia.extras.optimizer.simulated_request import SimulatedRequest, SimulatedResult
from charonia.extras.optimizer.simulation import EngineShape, Simulation

TraceName = Literal["conversation", "code"]
NARROW, WIDE, OF_DIFFERENCE = 0.05, 0.10, 1.5
"""Bounds: of throughput and of ITL's median, of the others, and in place of these so many times what runs differ by."""

SLOWER = 1.02
"""Beyond capacity the queue grows with every difference: a TTFT may be off by what steps do to it that take so much
longer, or so much less."""

_JUDGED = {True: "", False: "OFF"}
_CAPACITY_REQUESTS = 400
_PAUSE_SHARE = 0.1
"""Of a run to its last start: before that the first prompts come in, and nobody decodes."""

PlannedLoads: TypeAlias = Mapping[tuple[TraceName, float], Sequence[PlannedRequest]]

app = App(name="python -m tests.proofs.simulation", help=__doc__)


class RunFigures(msgspec.Struct, frozen=True):
    """What is compared: output tokens a second, and seconds."""

    throughput: float
    itl_p50: float
    itl_p99: float
    ttft_p50: float
    ttft_p90: float

    @classmethod
    def of(cls, due: Sequence[float], times: Sequence[Sequence[float]], tokens: int) -> "RunFigures":
        """Requests by when they were due, with the times of their tokens."""
        gaps = np.concatenate([np.diff(time) for time in times])
        ttft = [each[0] - at for at, each in zip(due, times, strict=True)]
        seconds = max(time[-1] for time in times) - min(due)
        itl_p50, itl_p99 = np.percentile(gaps, (50, 99)).tolist()
        ttft_p50, ttft_p90 = np.percentile(ttft, (50, 90)).tolist()
        return cls(tokens / seconds, itl_p50, itl_p99, ttft_p50, ttft_p90)


class MeasuredRun(msgspec.Struct, frozen=True, kw_only=True):
    """One run on the server."""

    trace: TraceName
    load: float
    requests: int
    figures: RunFigures


class SimulationRecord(msgspec.Struct, kw_only=True):
    """All that was measured; another `asked` begins anew. `speedups`: of each trace at each load, as the first machine
    that was calibrated has them."""

    asked: str
    runs: list[MeasuredRun] = []
    speedups: dict[str, float] = {}

    def plan(
        self, machine: MachineFile, trace: TraceName, jobs: Sequence[PlannedRequest], load: float, seconds: float
    ) -> list[PlannedRequest]:
        """The requests of a trace that come within so many seconds at this share of the capacity."""
        name = f"{trace} at {load:g}"
        if name not in self.speedups:
            capacity = find_capacity(machine.machine, machine.engine, jobs[:_CAPACITY_REQUESTS])
            self.speedups[name] = find_speedup(jobs, load * capacity, seconds)
        speedup = self.speedups[name]
        return due_within([msgspec.structs.replace(job, due=job.due / speedup) for job in jobs], seconds)

    def of(self, trace: TraceName, load: float) -> list[MeasuredRun]:
        return [run for run in self.runs if (run.trace, run.load) == (trace, load)]


class FigureVerdict(NamedTuple):
    """A figure of the simulation, how far it is from the mean of the runs as a share of that, and how far it may be."""

    name: str
    measured: tuple[float, ...]
    simulated: float
    off: float
    bound: float

    @property
    def holds(self) -> bool:
        return abs(self.off) <= self.bound


def simulate_load(
    machine: SimulatedMachine, engine: EngineShape, jobs: Sequence[PlannedRequest]
) -> tuple[Simulation, list[SimulatedResult]]:
    simulation = Simulation(machine, engine)
    return simulation, simulation.run([SimulatedRequest(job.due, job.prompt, job.new) for job in jobs])


def simulated_figures(machine: SimulatedMachine, engine: EngineShape, jobs: Sequence[PlannedRequest]) -> RunFigures:
    _, results = simulate_load(machine, engine, jobs)
    served = [result for result in results if result.tokens]
    times = [each.tokens for each in served]
    return RunFigures.of([each.arrival.at for each in served], times, sum(map(len, times)))


def find_capacity(machine: SimulatedMachine, engine: EngineShape, jobs: Sequence[PlannedRequest]) -> float:
    """New tokens a second while the queue is never empty: requests that are all there at once, until the last one
    starts."""
    open_queue = msgspec.structs.replace(engine, max_queued_requests=len(jobs) + 1, max_queued_tokens=1 << 60)
    _, results = simulate_load(machine, open_queue, [msgspec.structs.replace(job, due=0.0) for job in jobs])
    end = max(result.tokens[0] for result in results)
    begin = _PAUSE_SHARE * end
    return sum(begin < at <= end for result in results for at in result.tokens) / (end - begin)


def find_speedup(jobs: Sequence[PlannedRequest], rate: float, seconds: float) -> float:
    """How much faster than recorded a trace asks for so many new tokens a second within its first seconds."""
    low, high = 1e-3, 1e3
    for _ in range(40):
        middle = (low * high) ** 0.5
        asked = sum(job.new for job in jobs if job.due / middle < seconds) / seconds
        low, high = (middle, high) if asked < rate else (low, middle)
    return low


def judge(runs: Sequence[RunFigures], simulated: RunFigures, changed: Sequence[RunFigures] = ()) -> list[FigureVerdict]:
    """The figures of a simulation beside those of runs; beyond capacity `changed` has what it is with other steps."""
    verdicts = []
    for name in RunFigures.__struct_fields__:
        measured = tuple(float(getattr(run, name)) for run in runs)
        mean, found = sum(measured) / len(measured), float(getattr(simulated, name))
        bound = NARROW if name in ("throughput", "itl_p50") else WIDE
        if bound == WIDE:
            bound = max(bound, OF_DIFFERENCE * (max(measured) - min(measured)) / mean)
        if name.startswith("ttft"):
            bound = max([bound, *(abs(getattr(each, name) - found) / mean for each in changed)])
        verdicts.append(FigureVerdict(name, measured, found, found / mean - 1, bound))
    return verdicts


class ServedLoad(NamedTuple):
    """A real server over a checkpoint, and what it is asked for. `vocab`: token ids are below it."""

    checkpoint: Path
    arguments: tuple[str, ...]
    vocab: int

    def measure(self, jobs: Sequence[PlannedRequest], seed: int) -> RunFigures:
        """Raises `Unavailable` if a request fails."""
        with own_server(str(self.checkpoint), *self.arguments) as place:
            target = LoadTarget(
                host=place.host,
                port=place.http_port,
                door="completions",
                manner=RequestOptions(first_model(place)),
            )
            prompts = Prompts(form="ids", vocab=self.vocab, seed=seed)
            [outcome] = put_load(LoadRun(target=target, jobs=list(jobs), prompts=prompts, pace=LoopMode(timeout=3600)))
        return figures_of(outcome.records)


def figures_of(records: Sequence[LoadRecord]) -> RunFigures:
    """Raises `Unavailable` if a request failed."""
    if failed := next((record.status for record in records if record.status != OK), ""):
        raise Unavailable(f"a request failed, and nothing can be compared: {failed}")
    due, times = [record.due for record in records], [record.times for record in records]
    return RunFigures.of(due, times, sum(record.tokens for record in records))


def calibrated(checkpoint: Path, arguments: Sequence[str], scratch: Path, budget: str, log: Log) -> MachineFile:
    """The machine as `charonia calibrate` finds it, once."""
    path = scratch / "machine.json"
    if not path.exists():
        log(f"calibrating for {budget} ...")
        command = [sys.executable, "-m", "charonia", "calibrate", str(checkpoint), *arguments]
        done = subprocess.run([*command, "--budget", budget, "--output", str(path)], check=False)
        if done.returncode:
            raise Unavailable("the machine could not be calibrated")
    return read_machine_file(path)


def read_record(path: Path, asked: str) -> SimulationRecord:
    with suppress(OSError, msgspec.DecodeError):
        record = msgspec.json.decode(path.read_bytes(), type=SimulationRecord)
        if record.asked == asked:
            return record
    return SimulationRecord(asked=asked)


def vocabulary_of(checkpoint: Path) -> int:
    """Of prompts: the model's, or what any has."""
    try:
        return open_checkpoint(checkpoint).spec.vocab_size
    except CheckpointError:
        return 256


def compare(machine: MachineFile, record: SimulationRecord, planned: PlannedLoads) -> tuple[Table, bool]:
    """A table of all that was measured, and whether every figure holds."""
    titles = ("measured", "simulated", "off by", "bound", "steps 2 % shorter, longer", "")
    table, holds = table_of(("trace", "load", "requests", "figure"), titles), True
    for (name, load), jobs in planned.items():
        engine, runs = machine.engine, [each.figures for each in record.of(name, load)]
        if not runs:
            continue
        simulated = simulated_figures(machine.machine, engine, jobs)
        changed = [simulated_figures(machine.machine.slowed(each), engine, jobs) for each in (1 / SLOWER, SLOWER)]
        for verdict in judge(runs, simulated, changed if load > 1 else ()):
            beside = " / ".join(_told(verdict.name, getattr(each, verdict.name)) for each in changed)
            measured = " / ".join(_told(verdict.name, each) for each in verdict.measured)
            told = measured, _told(verdict.name, verdict.simulated), f"{verdict.off:+.1%}", f"{verdict.bound:.1%}"
            table.add_row(name, f"{load:g}", str(len(jobs)), verdict.name, *told, beside, _JUDGED[verdict.holds])
            holds &= verdict.holds
        table.add_section()
    return table, holds


def _told(name: str, value: float) -> str:
    return f"{value:,.1f} tokens/s" if name == "throughput" else f"{1e3 * value:,.1f} ms"


@app.default
def main(
    *,
    scratch: Path,
    traces: Path,
    checkpoint: Path | None = None,
    shape: ShapeName = "qwen2.5-0.5b",
    server_args: str = "--quantization int8 --max-num-seqs 16",
    trace: Annotated[tuple[TraceName, ...], Parameter(consume_multiple=True)] = ("conversation", "code"),
    loads: Annotated[tuple[float, ...], Parameter(consume_multiple=True)] = (0.5, 0.8, 1.2),
    seconds: Annotated[float, Positive] = 300.0,
    runs: Count = 2,
    longest: Count = 2048,
    budget: str = "5m",
) -> int:
    """Measure what is missing, and print the table.

    Parameters
    ----------
    scratch
        What is measured and made stays here.
    traces
        The directory of both traces.
    checkpoint
        Directory of a checkpoint; by default random weights are made.
    shape
        Whose shape random weights have.
    server_args
        Arguments of the server, and of its calibration.
    trace
        Which of them.
    loads
        Shares of the capacity.
    seconds
        In which requests come, in each run.
    runs
        Of each load.
    longest
        Prompts are cut so that no request is longer, in tokens.
    budget
        Time for the calibration.
    """
    console = Console(width=170, highlight=False)
    log = log_to(console)
    scratch.mkdir(parents=True, exist_ok=True)
    with exit_on_error(), prepare_checkpoint(checkpoint, shape, scratch, log) as (found, _):
        arguments = tuple(shlex.split(server_args))
        machine = calibrated(found, arguments, scratch, budget, log)
        server = ServedLoad(found, arguments, vocabulary_of(found))
        path = scratch / "simulation.json"
        record = read_record(path, f"{found.name} {server_args} {seconds:g} {longest}")
        recorded = {name: read_trace(traces / f"azure_{name}_2023.csv", longest=longest) for name in trace}
        planned = {
            (name, load): record.plan(machine, name, jobs, load, seconds)
            for name, jobs in recorded.items()
            for load in loads
        }
        for turn in range(runs):
            for (name, load), jobs in planned.items():
                if len(record.of(name, load)) > turn:
                    continue
                log(f"{name} at {load} of capacity, run {turn + 1}: {len(jobs)} requests ...")
                measured = server.measure(jobs, seed=1 + turn)
                run = MeasuredRun(trace=name, load=load, requests=len(jobs), figures=measured)
                record.runs.append(run)
                path.write_bytes(msgspec.json.encode(record))
        table, holds = compare(machine, record, planned)
    console.print(table)
    return 0 if holds else 1


if __name__ == "__main__":
    run_command(app)
