"""The cost of v2's infer: Charonia's endpoints with the identity model, beside bare handlers on the same libraries.

    python -m charonia.bench.classic --connections 32 --doors binary grpc

A closed loop from a process of its own, at several numbers of connections: wrk and h2load if they are installed. The
contenders take turns in one run, for the machine is shared and its speed is not constant. Requests per second depend on
the cores that the generator leaves free; requests per second of the server's CPU time do not.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.table import Table

from .command import Count, Log, exit_on_error, log_to, report_console
from .load.bare_infer import NAME
from .load.bare_server import bare_server
from .load.infer_generators import Driver, Generator, describe_generators, find_generator, run_load
from .load.infer_load import Door, InferLoad
from .server_process import CpuMeter, ServerAddress, own_server

IDENTITY = """\
name: "identity"
backend: "identity"
max_batch_size: 8
input { name: "INPUT0" data_type: TYPE_FP32 dims: 16 }
output { name: "OUTPUT0" data_type: TYPE_FP32 dims: 16 }
"""
_OURS = "charonia"
_BARE = "bare"

app = App(name="python -m charonia.bench.classic", help=__doc__)


@dataclass(frozen=True, slots=True, kw_only=True)
class InferTrial:
    """The load of every contender."""

    doors: Annotated[tuple[Door, ...], Parameter(consume_multiple=True, negative=())] = ("binary", "json", "grpc")
    """The protocols."""
    connections: Annotated[tuple[int, ...], Parameter(consume_multiple=True, negative=())] = (1, 8, 32, 128)
    """Requests at a time."""
    seconds: Annotated[float, Parameter(validator=Number(gt=0))] = 3.0
    """Of each turn."""
    repeats: Count = 3
    """Turns of each contender."""
    generator: Generator = "auto"
    """What drives them: wrk and h2load, which want whole seconds, or our own process; auto takes those that are
    there."""


class InferRun(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of one contender. `per_cpu_second`: answers for each second of the server's CPU time."""

    name: str
    door: Door
    driver: Driver
    connections: int
    per_second: float
    per_cpu_second: float
    p50_ms: float
    p99_ms: float
    generator_cores: float
    errors: int


class InferComparison(msgspec.Struct, frozen=True):
    """All turns, and their medians."""

    trial: InferTrial
    legs: list[InferRun]

    def median(self, name: str, door: Door, connections: int, figure: Callable[[InferRun], float]) -> float:
        chosen = [leg for leg in self.legs if (leg.name, leg.door, leg.connections) == (name, door, connections)]
        return median(map(figure, chosen))


def compare(trial: InferTrial, log: Log) -> InferComparison:
    """Run the contenders in turns.

    Raises:
        Unavailable: a server cannot be started, or a generator failed or is not installed.
    """
    legs: list[InferRun] = []
    with _servers() as places:
        for door in trial.doors:
            by = find_generator(door, trial.generator)
            for connections in trial.connections:
                for name, place in list(places.items()) * trial.repeats:
                    legs.append(_leg(name, place, _load(trial, place, door, connections), by))
                    log(_line(legs[-1]))
    return InferComparison(trial, legs)


def _load(trial: InferTrial, place: ServerAddress, door: Door, connections: int) -> InferLoad:
    port = place.grpc_port if door == "grpc" else place.http_port
    return InferLoad(door=door, port=port, connections=connections, seconds=trial.seconds, model=NAME)


def _leg(name: str, place: ServerAddress, load: InferLoad, by: Driver) -> InferRun:
    meter = CpuMeter(place.pid)
    meter.start()
    report = run_load(load, by)
    cores = meter.spent()
    # The meter sees our own generator's warm-up too, which is answered at the same rate.
    warm_up = load.warm_up if by == "own" else 0.0
    spent = 0.0 if cores is None else cores.frontend * report.seconds / (report.seconds + warm_up)
    return InferRun(
        name=name,
        door=load.door,
        driver=by,
        connections=load.connections,
        per_second=report.rate,
        per_cpu_second=report.answers / spent if spent else float("nan"),
        p50_ms=report.p50,
        p99_ms=report.p99,
        generator_cores=report.cpu / report.seconds,
        errors=report.errors,
    )


@contextmanager
def _servers() -> Iterator[dict[str, ServerAddress]]:
    with ExitStack() as stack:
        repository = Path(stack.enter_context(TemporaryDirectory(prefix="charonia-bench-")))
        (repository / NAME / "1").mkdir(parents=True)
        (repository / NAME / "config.pbtxt").write_text(IDENTITY)
        ours = stack.enter_context(own_server("--model-repository", str(repository)))
        yield {_OURS: ours, _BARE: stack.enter_context(bare_server("bare_infer"))}


def _line(leg: InferRun) -> str:
    return (
        f"{leg.door:6} {leg.connections:4} {leg.name:8} {leg.per_second:8.0f}/s {leg.per_cpu_second:8.0f} per CPU s, "
        f"p50 {leg.p50_ms:.2f} ms, p99 {leg.p99_ms:.2f} ms, generator {leg.generator_cores:.2f} cores, "
        f"{leg.errors} errors"
    )


def show(console: Console, comparison: InferComparison) -> None:
    """Medians, and Charonia's part of the bare handler's."""
    console.print(f"driven: {describe_generators(comparison.trial.doors, comparison.trial.generator)}", highlight=False)
    table = Table("door", "connections", "per second", "of bare", "per CPU second", "of bare", "p50 ms", "p99 ms")
    for door in comparison.trial.doors:
        for connections in comparison.trial.connections:
            table.add_row(door, str(connections), *_cells(comparison, door, connections))
    console.print(table)


def _cells(comparison: InferComparison, door: Door, connections: int) -> Sequence[str]:
    def of(name: str, figure: Callable[[InferRun], float]) -> float:
        return comparison.median(name, door, connections, figure)

    rate, bare_rate = (of(name, lambda leg: leg.per_second) for name in (_OURS, _BARE))
    cpu, bare_cpu = (of(name, lambda leg: leg.per_cpu_second) for name in (_OURS, _BARE))
    p50, p99 = of(_OURS, lambda leg: leg.p50_ms), of(_OURS, lambda leg: leg.p99_ms)
    parts = (f"{rate:.0f}", f"{rate / bare_rate:.0%}", f"{cpu:.0f}", f"{cpu / bare_cpu:.0%}")
    return (*parts, f"{p50:.2f}", f"{p99:.2f}")


@app.default
def classic(*, trial: Annotated[InferTrial, Parameter("*")] = InferTrial(), json: Path | None = None) -> None:
    """Compare Charonia's endpoints with bare handlers.

    Parameters
    ----------
    json
        Write the turns to this file.
    """
    console = report_console()
    with exit_on_error():
        comparison = compare(trial, log_to(console))
    show(console, comparison)
    if json:
        json.write_bytes(msgspec.json.encode(comparison))


if __name__ == "__main__":
    app()
