"""The cost of the frontend: its endpoints with a model that only counts, beside a bare handler that sends as many
frames of the same size. Both take turns in one run, for the machine is shared and its speed is not constant.

Frames per second are the throughput of one frontend here, with generator and engine core on the same machine, and are
meaningful if the frontend was busy all the time. CPU time per frame leaves the others out. A frame may hold several
tokens: tokens that a busy frontend has not sent yet merge.

The bare handler runs each stream to its end in one go, and once more with a turn of the others after each frame, as
streams of one engine must. With a step time it also waits that long between frames: then every frame wakes its reader,
which makes the same system call several times dearer. Paced, only CPU time per frame compares.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Annotated

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number
from rich.console import Console

from ...core.errors import Unavailable
from ...planning.requests import uniform_jobs
from ..command import Count, Log, table_of
from ..server_process import (
    CpuMeter,
    ServerAddress,
    own_server,
    require_open,
)
from .bare_server import bare_server
from .bare_streams import FrameSpec
from .driver import EndpointName, LoopMode, RequestOptions
from .fake_model import NAME, write_repository
from .figures import compute_figures
from .plan import Form, Prompts
from .worker import LoadRun, LoadTarget, WorkerOutcome, run

_BLOCK = 16
_OURS = "charonia"
_TURNS = "bare, in turns"
_STEPS = "bare, in steps"


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontendTrial:
    """The load of every turn of every contender."""

    door: EndpointName = "completions"
    """The protocol."""
    streams: Count = 256
    """Requests at a time."""
    requests: Count = 512
    """Requests of one turn."""
    prompt: Count = 16
    """Tokens of each prompt."""
    new: Count = 128
    """New tokens of each request."""
    repeats: Count = 2
    """Turns of each contender."""
    step_ms: Annotated[float, Parameter(validator=Number(gte=0))] = 15.0
    """Milliseconds that a step of the fake engine takes, besides what it costs; at 0 most frames hold many tokens."""
    processes: Count = 1
    """Generator processes."""


class FrontendRun(msgspec.Struct, frozen=True, kw_only=True):
    """One turn of one contender. `frontend_cpu` and `generator_cpu` are cores used on average, the latter by the
    busiest generator; `microseconds_per_frame` are of frontend CPU, a request's own cost spread over its frames."""

    name: str
    frames: int
    tokens_per_frame: float
    bytes_per_frame: float
    frames_per_s: float
    microseconds_per_frame: float
    frontend_cpu: float
    generator_cpu: float
    errors: dict[str, int]


class FrontendComparison(msgspec.Struct, frozen=True):
    """All turns, and the medians' ratios."""

    trial: FrontendTrial
    legs: list[FrontendRun]

    def frames_per_s(self, name: str) -> float:
        return median(leg.frames_per_s for leg in self.legs if leg.name == name)

    def microseconds_per_frame(self, name: str) -> float:
        return median(leg.microseconds_per_frame for leg in self.legs if leg.name == name)

    def others(self) -> list[str]:
        """The contenders beside charonia."""
        return [name for name in dict.fromkeys(leg.name for leg in self.legs) if name != _OURS]

    def ratio(self, name: str) -> float:
        """Charonia's frames per second, in those of contender `name`."""
        return self.frames_per_s(_OURS) / self.frames_per_s(name)

    def cpu_ratio(self, name: str) -> float:
        """The same ratio per second of frontend CPU."""
        return self.microseconds_per_frame(name) / self.microseconds_per_frame(_OURS)


def compare(trial: FrontendTrial, log: Log) -> FrontendComparison:
    """Run the contenders in turns.

    Raises:
        Unavailable: a server cannot be started, or its endpoint refuses.
    """
    with _servers(trial) as (ours, bare):
        legs: list[FrontendRun] = []
        for _ in range(trial.repeats):
            first = _leg(_OURS, trial, ours, None)
            legs.append(first)
            log(_line(first))
            for name, pause in _bare_ways(trial).items():
                legs.append(_leg(name, trial, bare, _frames(first, trial, pause)))
                log(_line(legs[-1]))
        return FrontendComparison(trial, legs)


def _bare_ways(trial: FrontendTrial) -> dict[str, float | None]:
    steps = {_STEPS: trial.step_ms / 1e3} if trial.step_ms else {}
    return {"bare": None, _TURNS: 0.0, **steps}


def _frames(leg: FrontendRun, trial: FrontendTrial, pause: float | None) -> FrameSpec:
    return FrameSpec(max(1, round(leg.frames / trial.requests)), round(leg.bytes_per_frame), pause)


@contextmanager
def _servers(trial: FrontendTrial) -> Iterator[tuple[ServerAddress, ServerAddress]]:
    parameters = {
        "max_num_seqs": trial.streams,
        "max_num_batched_tokens": 4 * trial.streams,
        "max_queued_requests": 2 * trial.streams,
        "fake_step_seconds": trial.step_ms / 1e3,
        "fake_max_model_len": _length(trial),
        # Room for all: preemption is no business of the frontend's.
        "kv_cache_blocks": trial.streams * (_length(trial) // _BLOCK + 1),
    }
    with ExitStack() as stack:
        scratch = stack.enter_context(TemporaryDirectory(prefix="charonia-bench-"))
        repository = write_repository(Path(scratch) / "models", parameters)
        ours = stack.enter_context(own_server("--model-repository", str(repository)))
        if trial.door == "grpc":
            require_open(ours, ours.grpc_port, "the gRPC door")
        yield ours, stack.enter_context(bare_server("bare_streams"))


def _length(trial: FrontendTrial) -> int:
    return trial.prompt + trial.new + _BLOCK


def _leg(name: str, trial: FrontendTrial, place: ServerAddress, frames: FrameSpec | None) -> FrontendRun:
    meter = CpuMeter(place.pid)
    outcomes = run(_load(trial, place, frames), trial.processes, on_start=meter.start)
    spent = meter.spent()
    return _measured(name, outcomes, spent.frontend if spent else float("nan"))


def _load(trial: FrontendTrial, place: ServerAddress, frames: FrameSpec | None) -> LoadRun:
    grpc = trial.door == "grpc"
    # Whatever our door is called: the bare handler's events are those of completions.
    door: EndpointName = trial.door if grpc or frames is None else "completions"
    form: Form = "text" if door == "chat" else "ids"
    target = LoadTarget(
        host=place.host,
        port=place.grpc_port if grpc else place.http_port,
        door=door,
        manner=RequestOptions(NAME, counted=False),
    )
    fixed = None if frames is None else frames.prompt()
    return LoadRun(
        target=target,
        jobs=uniform_jobs([0.0] * trial.requests, trial.prompt, trial.new),
        prompts=Prompts(form=form, fixed=fixed),
        pace=LoopMode(concurrency=trial.streams),
        warm_up=0,
    )


def _measured(name: str, outcomes: Sequence[WorkerOutcome], spent: float) -> FrontendRun:
    seen = compute_figures([record for outcome in outcomes for record in outcome.records])
    if not seen.frames:
        raise Unavailable(f"{name} sent nothing: {seen.errors}")
    return FrontendRun(
        name=name,
        frames=seen.frames,
        tokens_per_frame=seen.output_tokens / seen.frames,
        bytes_per_frame=seen.size / seen.frames,
        frames_per_s=seen.per_second(seen.frames),
        microseconds_per_frame=spent / seen.frames * 1e6,
        frontend_cpu=spent / seen.seconds,
        generator_cpu=max(outcome.cpu / outcome.seconds for outcome in outcomes),
        errors=seen.errors,
    )


def _line(leg: FrontendRun) -> str:
    return f"{leg.name}: {leg.frames_per_s:,.0f} frames/s" + (f", errors {leg.errors}" if leg.errors else "")


def _cells(leg: FrontendRun) -> list[str]:
    return [
        f"{leg.frames:,}",
        f"{leg.tokens_per_frame:.2f}",
        f"{leg.bytes_per_frame:.0f}",
        f"{leg.frames_per_s:,.0f}",
        f"{leg.microseconds_per_frame:.1f}",
        f"{leg.frontend_cpu:.0%}",
        f"{leg.generator_cpu:.0%}",
    ]


def show(console: Console, comparison: FrontendComparison) -> None:
    """Print the turns and the ratios."""
    trial = comparison.trial
    columns = ("frames", "tokens each", "bytes each", "per s", "CPU µs each", "frontend CPU", "generator CPU")
    title = f"{trial.door}: {trial.streams} streams, {trial.requests} requests of {trial.new} tokens"
    table = table_of(("",), columns, title)
    for leg in comparison.legs:
        table.add_row(leg.name, *_cells(leg))
    console.print(table)
    for name in comparison.others():
        by_cpu = comparison.cpu_ratio(name)
        console.print(f"charonia / {name}: {comparison.ratio(name):.2f} in frames/s, {by_cpu:.2f} per frontend CPU")
