"""What a tensor costs the server on its way to a model that computes nothing, and back.

    python -m charonia.bench.tensors
    python -m charonia.bench.tensors --before DIR --doors binary json --connections 1 32 --repeats 5
    python -m charonia.bench.tensors --elements 262144 --doors binary grpc

Servers take turns under the same closed loop of identity requests: this one, with `--before` one of another checkout,
and over gRPC a bare `grpc.aio` method that parses a request and gives its tensors back. Told are the requests for each
CPU second of the server's process (those of /proc), and the ratios of figures of the same turn.
"""

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, TypeAlias

import msgspec
from cyclopts import App, Parameter
from rich.console import Console

from ..core.errors import Unavailable
from .command import Count, Counts, Log, Positive, Several, exit_on_error, log_to, report_console, run_command, table_of
from .load.infer_load import Door, InferLoad, run_load
from .server_process import (
    LOOPBACK,
    ServerAddress,
    free_ports,
    own_server,
    process_cpu,
    run_process,
    until_open,
)
from .trial import median_of, ratio_of, take_turns

_CONFIG = """\
name: "identity"
backend: "identity"
max_batch_size: 8
input {{ name: "INPUT0" data_type: TYPE_FP32 dims: {elements} }}
output {{ name: "OUTPUT0" data_type: TYPE_FP32 dims: {elements} }}
"""

app = App(name="python -m charonia.bench.tensors", help=__doc__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorTrial:
    """The load of every turn of every server."""

    doors: Annotated[tuple[Door, ...], Several] = ("binary", "json", "grpc")
    """Over which protocols."""
    connections: Counts = (1, 32)
    """Requests at a time."""
    elements: Count = 16
    """Of each tensor."""
    seconds: Annotated[float, Positive] = 4.0
    """Of each turn."""
    repeats: Count = 3
    """Turns of each server."""


class TensorLeg(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of one server. `per_cpu_second`: requests for each CPU second of its process; `per_second`: as seen."""

    server: str
    door: Door
    connections: int
    per_cpu_second: float
    per_second: float


Turns: TypeAlias = dict[str, list[TensorLeg]]


def compare(trial: TensorTrial, before: Path | None, log: Log) -> list[Turns]:
    """The turns of each door and number of connections.

    Raises:
        Unavailable: a server cannot be started, or refuses requests.
    """
    with _servers(trial, before) as places:
        every = []
        for door, connections in product(trial.doors, trial.connections):
            asked = {name: place for name, place in places.items() if door == "grpc" or name != "bare"}
            contenders = {name: partial(_leg, name, place, door, connections, trial) for name, place in asked.items()}
            every.append(take_turns(contenders, trial.repeats, log, _line))
        return every


def write_identity(directory: Path, elements: int = 16) -> None:
    """Add the model `identity` to a repository, for tensors of so many elements."""
    (directory / "identity" / "1").mkdir(parents=True)
    (directory / "identity" / "config.pbtxt").write_text(_CONFIG.format(elements=elements))


@contextmanager
def _servers(trial: TensorTrial, before: Path | None) -> Iterator[dict[str, ServerAddress]]:
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="charonia-bench-")))
        write_identity(scratch, trial.elements)
        flags = "--model-repository", str(scratch)
        places: dict[str, ServerAddress] = {"now": stack.enter_context(own_server(*flags))}
        if before is not None:
            places["before"] = stack.enter_context(own_server(*flags, checkout=before))
        if "grpc" in trial.doors:
            places["bare"] = stack.enter_context(_bare_grpc())
        yield places


@contextmanager
def _bare_grpc() -> Iterator[ServerAddress]:
    [port] = free_ports(1)
    with run_process([sys.executable, "-m", "charonia.bench.load.bare_grpc", str(port)]) as (pid, alive):
        place = ServerAddress(LOOPBACK, port, port, pid)
        until_open(place, alive)
        yield place


def _leg(name: str, place: ServerAddress, door: Door, connections: int, trial: TensorTrial, number: int) -> TensorLeg:
    assert place.pid is not None
    load = InferLoad(
        door=door,
        port=place.port_of(door),
        connections=connections,
        seconds=trial.seconds,
        warm_up=0.0,  # all that is sent is counted: the meter sees it too
        shape=(1, trial.elements),
    )
    begun = process_cpu(place.pid)
    report = run_load(load)
    if report.errors:
        raise Unavailable(f"{report.errors} requests to the server '{name}' failed")
    return TensorLeg(
        server=name,
        door=door,
        connections=connections,
        per_cpu_second=report.answers / (process_cpu(place.pid) - begun),
        per_second=report.rate,
    )


def _line(leg: TensorLeg) -> str:
    return f"{leg.door:6} {leg.connections:3} {leg.per_cpu_second:8,.0f} a CPU second, {leg.per_second:8,.0f}/s"


def show(console: Console, every: list[Turns]) -> None:
    """Print the medians, and the ratios within turns."""
    table = table_of(("door",), ("connections", "now", "before", "bare", "now / before", "now / bare"))
    for turns in every:
        now = turns["now"]
        rates = {name: f"{median_of(legs, _rate):,.0f}" for name, legs in turns.items()}
        ratios = {name: f"{ratio_of(now, legs, _rate):.2f}" for name, legs in turns.items()}
        cells = [rates.get(name, "") for name in ("now", "before", "bare")]
        cells += [ratios.get(name, "") for name in ("before", "bare")]
        table.add_row(now[0].door, str(now[0].connections), *cells)
    console.print(table)


def _rate(leg: TensorLeg) -> float:
    return leg.per_cpu_second


@app.default
def main(
    *,
    trial: Annotated[TensorTrial, Parameter("*")] = TensorTrial(),
    before: Path | None = None,
    json: Path | None = None,
) -> int:
    """Measure the requests for each CPU second, in turns.

    Parameters
    ----------
    before
        Directory with another `charonia` in it, whose server takes its turns too.
    json
        Write the turns to this file.
    """
    console = report_console()
    with exit_on_error():
        every = compare(trial, before, log_to(console))
    show(console, every)
    if json:
        json.write_bytes(msgspec.json.encode([leg for turns in every for legs in turns.values() for leg in legs]))
    return 0


if __name__ == "__main__":
    run_command(app)
