"""Load for a server: open or closed loop, over every streaming endpoint.

    python -m charonia.bench.serve http://localhost:8000 --concurrency 8 --requests 64
    python -m charonia.bench.serve --checkpoint DIR --rate 2 --requests 100 --slo-ttft-ms 500 --json result.json
    python -m charonia.bench.serve --model-repository DIR --trace trace.csv --speedup 10 --duration 60

Without a URL it starts a server on free loopback ports, and stops it afterwards.
"""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter
from cyclopts.validators import Number
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from ..core.errors import InvalidArgument
from .command import Count, Positive, exit_on_error, report_console, run_command
from .load.driver import CHATS, EndpointName, LoopMode, RequestOptions
from .load.figures import Cpu, LoadResult, Slo, compute_figures, require_matplotlib, show, write_json, write_plot
from .load.plan import Form, Prompts
from .load.planned_requests import PlannedRequest, draw_arrivals, due_within, read_trace, uniform_jobs
from .load.worker import LoadRun, LoadTarget, RequestProgress, WorkerOutcome, run
from .server_process import (
    GRPC_PORT,
    CpuMeter,
    CpuSeconds,
    ServerAddress,
    first_model,
    own_server,
    parse_server_url,
    require_open,
)

ENDLESS = 100_000
"""Requests of a closed loop that only its duration is to end."""

_Switch = Parameter(negative=())


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFlags:
    """Whom to ask, and where."""

    model_repository: Path | None = None
    """Start a server of our own over this repository."""
    checkpoint: Path | None = None
    """Start a server of our own over this checkpoint."""
    server_args: Annotated[str, Parameter(allow_leading_hyphen=True)] = ""
    """More arguments of `charonia serve` for a server of our own."""
    model: str = ""
    """The model to ask; by default the server's first."""
    door: EndpointName = "completions"
    """The protocol: OpenAI's completions, chat or responses, Anthropic's messages, v2's generate_stream, or gRPC's
    ModelStreamInfer."""
    grpc_port: int = GRPC_PORT
    """The gRPC door's port, of a server given by its URL."""
    allow_remote: Annotated[bool, _Switch] = False
    """Allow a server that is not this machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadFlags:
    """The load. Give one of rate, trace and concurrency."""

    rate: Annotated[float | None, Positive] = None
    """Open loop: requests per second on average, arriving at random (Poisson)."""
    trace: Path | None = None
    """Open loop: a CSV with arrived_at, num_prefill_tokens, num_decode_tokens."""
    concurrency: Annotated[int | None, Positive] = None
    """Closed loop: requests at a time."""
    speedup: Annotated[float, Positive] = 1.0
    """How much faster than recorded a trace is played."""
    limit: Annotated[int | None, Positive] = None
    """Only the first rows of a trace."""
    longest: Annotated[int | None, Parameter(validator=Number(gte=2))] = None
    """Cut a trace's prompts so that no request exceeds this many tokens."""
    requests: Annotated[int | None, Positive] = None
    """How many requests."""
    duration: Annotated[float | None, Positive] = None
    """Seconds after which no request begins."""
    prompt: Count = 128
    """Tokens of each prompt."""
    new: Count = 64
    """New tokens of each request."""
    form: Form | None = None
    """Prompts as token ids or as text; chat is always text."""
    vocab: Count = 256
    """Token ids of prompts are below this."""
    shared_prefix: int = 0
    """Tokens at the beginning that all prompts share."""
    temperature: float = 0.0
    """Sampling temperature."""
    stop_at_eos: Annotated[bool, _Switch] = False
    """Let the model end before all new tokens are there."""
    seed: int = 0
    """Of arrivals and prompts."""
    timeout: Annotated[float, Positive] = 600.0
    """Seconds a request may take."""
    warmup: int = 1
    """Requests of each generator process before the start, in no figure."""
    processes: Count = 1
    """Generator processes."""


def build_load(place: ServerAddress, server: ServerFlags, work: LoadFlags) -> LoadRun:
    if server.door == "grpc":
        require_open(place, place.grpc_port, "the gRPC door")
    manner = RequestOptions(server.model or first_model(place), work.temperature, not work.stop_at_eos)
    return LoadRun(
        target=LoadTarget(host=place.host, port=place.port_of(server.door), door=server.door, manner=manner),
        jobs=plan_requests(work),
        prompts=Prompts(form=_form(server, work), vocab=work.vocab, shared=work.shared_prefix, seed=work.seed),
        pace=LoopMode(concurrency=work.concurrency or 0, duration=work.duration, timeout=work.timeout),
        warm_up=work.warmup,
    )


def plan_requests(work: LoadFlags) -> list[PlannedRequest]:
    """The requests of a load.

    Raises:
        InvalidArgument: it has no pace, or several, or no end; or the trace cannot be read.
    """
    if sum(choice is not None for choice in (work.rate, work.trace, work.concurrency)) != 1:
        raise InvalidArgument("give one of --rate, --trace and --concurrency")
    if work.trace is not None:
        limit = min(filter(None, (work.limit, work.requests)), default=None)
        jobs = read_trace(work.trace, speedup=work.speedup, limit=limit, longest=work.longest)
        return due_within(jobs, work.duration)
    if work.requests is None and work.duration is None:
        raise InvalidArgument("give --requests or --duration, or both: else it never ends")
    if work.rate is None:
        return uniform_jobs([0.0] * (work.requests or ENDLESS), work.prompt, work.new)
    return uniform_jobs(draw_arrivals(work.rate, work.seed, work.requests, work.duration), work.prompt, work.new)


def _form(server: ServerFlags, work: LoadFlags) -> Form:
    chats = server.door in CHATS
    if chats and work.form == "ids":
        raise InvalidArgument(f"{server.door}: a chat takes no token ids")
    return work.form or ("text" if chats else "ids")


def describe_load(server: ServerFlags, work: LoadFlags) -> dict[str, Any]:
    return {**msgspec.to_builtins(server, enc_hook=str), **msgspec.to_builtins(work, enc_hook=str)}


app = App(name="python -m charonia.bench.serve", help=__doc__)


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputOptions:
    """The outputs of a run."""

    slo_ttft_ms: float | None = None
    """A good request has its first token within this time."""
    slo_itl_ms: float | None = None
    """A good request's tokens are this far apart at most, on average."""
    json: Path | None = None
    """Write figures, settings and every request to this file."""
    plot: Path | None = None
    """Draw distributions and output over time into this PNG."""


@app.default
def load(
    url: str | None = None,
    /,
    *,
    server: Annotated[ServerFlags, Parameter("*")] = ServerFlags(),
    work: Annotated[LoadFlags, Parameter("*")] = LoadFlags(),
    output: Annotated[OutputOptions, Parameter("*")] = OutputOptions(),
) -> int:
    """Put a load to a server.

    Parameters
    ----------
    url
        http://host:port of a server that runs; otherwise give --model-repository or --checkpoint.
    """
    console = report_console()
    with exit_on_error():
        if output.plot:
            require_matplotlib()
        with _place(url, server, console) as place:
            result = _measure(place, server, work, output, console)
        show(console, result)
        if output.json:
            write_json(output.json, result)
        if output.plot:
            write_plot(output.plot, result)
        return 0 if result.figures.succeeded else 1


@contextmanager
def _place(url: str | None, server: ServerFlags, console: Console) -> Iterator[ServerAddress]:
    if sum(choice is not None for choice in (url, server.model_repository, server.checkpoint)) != 1:
        raise InvalidArgument("give one of a server's URL, --model-repository and --checkpoint")
    if url is not None:
        place = parse_server_url(url, server.grpc_port, server.allow_remote)
        require_open(place, place.http_port, "the server")
        yield place
        return
    repository = server.model_repository
    what = [str(server.checkpoint)] if repository is None else ["--model-repository", str(repository)]
    console.print("starting a server ...")
    with own_server(*what, *shlex.split(server.server_args)) as place:
        yield place


def _measure(
    place: ServerAddress, server: ServerFlags, work: LoadFlags, output: OutputOptions, console: Console
) -> LoadResult:
    wanted = build_load(place, server, work)
    meter = CpuMeter(place.pid)
    with _progress(console, len(wanted.jobs)) as bar:
        outcomes = run(wanted, work.processes, bar, meter.start)
    cpu = _cpu(outcomes, meter.cores())
    slo = Slo(output.slo_ttft_ms, output.slo_itl_ms)
    records = [record for outcome in outcomes for record in outcome.records]
    return LoadResult(describe_load(server, work), compute_figures(records, slo), slo, cpu, records)


def _cpu(outcomes: list[WorkerOutcome], server: CpuSeconds | None) -> Cpu:
    generator = [outcome.cpu / outcome.seconds for outcome in outcomes]
    if server is None:
        return Cpu(generator=generator)
    return Cpu(generator=generator, frontend=server.frontend, engine=server.engine)


@contextmanager
def _progress(console: Console, requests: int) -> "Iterator[Any]":
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("warming up")

        def tell(seen: RequestProgress) -> None:
            of = f" of {requests}" if requests < ENDLESS else ""
            failed = f", {seen.failed} failed" if seen.failed else ""
            running = seen.sent - seen.done
            text = f"{seen.done}{of} requests done, {running} running{failed}, {seen.tokens} tokens"
            bar.update(task, description=text)

        yield tell


if __name__ == "__main__":
    run_command(app)
