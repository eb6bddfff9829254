"""What several frontends cost: CPU time by process, of a server with one frontend and of one with `--frontends 2`.

    python -m charonia.bench.frontends
    python -m charonia.bench.frontends --loads binary frames --repeats 5 --json FILE
    python -m charonia.bench.frontends --before DIR

The servers take turns under the same load: identity requests over binary HTTP and over gRPC, and frames of streams
whose tokens are counted, not computed. CPU seconds are those of /proc, of every process but the client's, and are told
per request, or frame. From them follow the rates that 2, 4 and 8 frontends would have on cores of their own, and where
the hub is full. The rate that was seen is told too; where client and server share the cores it says little. Ends with
status 1 if a bar is missed: the hub at most a fifth of a frontend, all processes together at most 1.3 of one process.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Literal, NamedTuple, TypeAlias

import msgspec
from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console

from ..core.errors import Unavailable
from .command import Count, Log, Positive, Several, exit_on_error, log_to, report_console, run_command, table_of
from .load import fake_model
from .load.driver import LoopMode, RequestOptions
from .load.figures import compute_figures
from .load.infer_load import InferLoad, run_load
from .load.plan import Prompts
from .load.planned_requests import uniform_jobs
from .load.worker import LoadRun, LoadTarget, run
from .server_process import ServerAddress, children, own_server, process_cpu, process_name
from .tensors import write_identity
from .trial import median_of, take_turns

LoadName: TypeAlias = Literal["binary", "json", "grpc", "frames"]
_ONE, _SEVERAL, _BEFORE = "one", "several", "before"
_HUB_BAR, _WHOLE_BAR = 0.2, 1.3
_FRONTEND, _CORE = "charonia-front", "charonia-core"
_PROMPT = 16
_COUNTS = (2, 4, 8)

app = App(name="python -m charonia.bench.frontends", help=__doc__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeveralTrial:
    """The load of every turn of every server."""

    loads: Annotated[tuple[LoadName, ...], Several] = ("binary", "grpc", "frames")
    """What is asked."""
    connections: Count = 64
    """Requests at a time, of identity requests."""
    seconds: Annotated[float, Positive] = 5.0
    """Of each turn of them."""
    streams: Count = 256
    """Streams at a time, of frames."""
    requests: Count = 512
    """Streams of each turn."""
    new: Count = 128
    """Tokens of each stream."""
    step_ms: Annotated[float, Parameter(validator=Number(gte=0))] = 25.0
    """Milliseconds of a step that makes a frame for every stream."""
    repeats: Count = 3
    """Turns of each server."""


class FrontendLeg(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of one server. Microseconds of CPU per request, or frame: of the server's own process, which is the hub
    where there are several frontends; of all frontends; of engine cores."""

    server: str
    load: LoadName
    count: int
    per_second: float
    hub: float
    frontends: float
    engine: float

    @property
    def whole(self) -> float:
        """But for the engine's, which is the same for all."""
        return self.hub + self.frontends


class SeveralVerdict(NamedTuple):
    """The medians of one load: microseconds of CPU of one process, of the hub, and of all frontends."""

    load: LoadName
    one: float
    hub: float
    frontends: float
    before: float | None

    @property
    def hub_share(self) -> float:
        return self.hub / self.frontends

    @property
    def whole_ratio(self) -> float:
        return (self.hub + self.frontends) / self.one

    @property
    def holds(self) -> bool:
        return self.hub_share <= _HUB_BAR and self.whole_ratio <= _WHOLE_BAR

    def rate(self, count: int) -> float:
        """Requests per second of `count` frontends, each with a core, and the hub with one: what they take, or what it
        does."""
        return min(count / self.frontends, 1 / self.hub) * 1e6


def compare(trial: SeveralTrial, before: Path | None, log: Log) -> dict[LoadName, dict[str, list[FrontendLeg]]]:
    """The legs of each load by server; the servers take turns.

    Raises:
        Unavailable: a server cannot be started, or answers nothing.
    """
    with _servers(trial, before) as places:
        return {
            load: take_turns(
                {name: partial(_leg, name, place, load, trial) for name, place in places.items()},
                trial.repeats,
                log,
                _line,
            )
            for load in trial.loads
        }


@contextmanager
def _servers(trial: SeveralTrial, before: Path | None) -> Iterator[dict[str, ServerAddress]]:
    longest = _PROMPT + trial.new + fake_model.BLOCK
    parameters = fake_model.stream_parameters(trial.streams, trial.step_ms, longest)
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(TemporaryDirectory(prefix="charonia-bench-")))
        repository = fake_model.write_repository(scratch / "models", parameters)
        write_identity(repository)
        flags = "--model-repository", str(repository)
        places = {_ONE: stack.enter_context(own_server(*flags, "--frontends", "1"))}
        if before is not None:
            places[_BEFORE] = stack.enter_context(own_server(*flags, checkout=before))
        places[_SEVERAL] = stack.enter_context(own_server(*flags, "--frontends", "2"))
        yield places


def _leg(name: str, place: ServerAddress, load: LoadName, trial: SeveralTrial, number: int) -> FrontendLeg:
    assert place.pid is not None
    processes = {pid: process_name(pid) for pid in (place.pid, *children(place.pid))}
    begun: dict[int, float] = {}

    def start() -> None:
        begun.update((pid, process_cpu(pid)) for pid in processes)

    count, per_second = _stream(place, trial, start) if load == "frames" else _infer(place, load, trial, start)
    if not count:
        raise Unavailable(f"the server of {name} answered nothing")
    spent = {pid: (process_cpu(pid) - before) / count * 1e6 for pid, before in begun.items()}
    return FrontendLeg(
        server=name,
        load=load,
        count=count,
        per_second=per_second,
        hub=spent[place.pid],
        frontends=sum(spent[pid] for pid, called in processes.items() if called == _FRONTEND),
        engine=sum(spent[pid] for pid, called in processes.items() if called == _CORE),
    )


def _infer(place: ServerAddress, load: LoadName, trial: SeveralTrial, start: Callable[[], None]) -> tuple[int, float]:
    """Answers, and how many a second."""
    assert load != "frames"
    start()
    # All that is sent is counted: the meter sees it too.
    identity_load = InferLoad(
        door=load, port=place.port_of(load), connections=trial.connections, seconds=trial.seconds, warm_up=0.0
    )
    report = run_load(identity_load)
    if report.errors:
        raise Unavailable(f"{report.errors} identity requests failed")
    return report.answers, report.rate


def _stream(place: ServerAddress, trial: SeveralTrial, start: Callable[[], None]) -> tuple[int, float]:
    """Frames, and how many a second."""
    manner = RequestOptions(fake_model.NAME, counted=False)
    stream_load = LoadRun(
        target=LoadTarget(host=place.host, port=place.http_port, door="completions", manner=manner),
        jobs=uniform_jobs([0.0] * trial.requests, _PROMPT, trial.new),
        prompts=Prompts(form="ids"),
        pace=LoopMode(concurrency=trial.streams),
        warm_up=0,
    )
    seen = compute_figures([record for outcome in run(stream_load, on_start=start) for record in outcome.records])
    if seen.errors:
        raise Unavailable(f"streams failed: {seen.errors}")
    return seen.frames, seen.per_second(seen.frames)


def judge(load: LoadName, legs: Mapping[str, Sequence[FrontendLeg]]) -> SeveralVerdict:
    """The verdict of a load, of the legs of each server."""
    return SeveralVerdict(
        load,
        median_of(legs[_ONE], lambda leg: leg.whole),
        median_of(legs[_SEVERAL], lambda leg: leg.hub),
        median_of(legs[_SEVERAL], lambda leg: leg.frontends),
        median_of(legs[_BEFORE], lambda leg: leg.whole) if _BEFORE in legs else None,
    )


def _line(leg: FrontendLeg) -> str:
    return (
        f"{leg.load:6} {leg.per_second:8,.0f}/s, CPU µs each: hub {leg.hub:.1f}, "
        f"frontends {leg.frontends:.1f}, engine {leg.engine:.1f}"
    )


def show(console: Console, verdicts: Sequence[SeveralVerdict]) -> None:
    """Print the bars, and what follows from the medians."""
    columns = ("one", "before", "hub", "frontend", "hub / frontend", "all / one", "")
    costs = table_of(("CPU µs each",), columns, f"bars: hub at most {_HUB_BAR:.0%}, all at most {_WHOLE_BAR}")
    rates = table_of(
        ("per second",), ("1", *map(str, _COUNTS), "hub full at"), "computed, with a core for each process"
    )
    for verdict in verdicts:
        before = "" if verdict.before is None else f"{verdict.before:.1f}"
        figures = f"{verdict.one:.1f}", before, f"{verdict.hub:.1f}", f"{verdict.frontends:.1f}"
        missed = "" if verdict.holds else "missed"
        costs.add_row(verdict.load, *figures, f"{verdict.hub_share:.1%}", f"{verdict.whole_ratio:.2f}", missed)
        several = (f"{verdict.rate(count):,.0f}" for count in _COUNTS)
        rates.add_row(verdict.load, f"{1e6 / verdict.one:,.0f}", *several, f"{1 / verdict.hub_share:.1f} frontends")
    console.print(costs)
    console.print(rates)


@app.default
def main(
    *,
    trial: Annotated[SeveralTrial, Parameter("*")] = SeveralTrial(),
    before: Path | None = None,
    json: Path | None = None,
) -> int:
    """Measure one frontend and two, in turns.

    Parameters
    ----------
    before
        Directory with another `charonia` in it, whose server takes its turns too: what one frontend cost before.
    json
        Write the turns to this file.
    """
    console = report_console()
    with exit_on_error():
        legs = compare(trial, before, log_to(console))
    verdicts = [judge(load, by_server) for load, by_server in legs.items()]
    show(console, verdicts)
    if json:
        every = [leg for by_server in legs.values() for turns in by_server.values() for leg in turns]
        json.write_bytes(msgspec.json.encode(every))
    return 0 if all(verdict.holds for verdict in verdicts) else 1


if __name__ == "__main__":
    run_command(app)
