"""Load for a server: open or closed loop, over every streaming endpoint; and the cost of its frontend.

    python -m charonia.bench.serve http://localhost:8000 --concurrency 8 --requests 64
    python -m charonia.bench.serve --checkpoint DIR --rate 2 --requests 100 --slo-ttft-ms 500 --json result.json
    python -m charonia.bench.serve --model-repository DIR --trace trace.csv --speedup 10 --duration 60
    python -m charonia.bench.serve frontend --streams 256

Without a URL it starts a server on free loopback ports, and stops it afterwards.
"""

import shlex
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import msgspec
from cyclopts import App, Parameter
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

from ..core.errors import InvalidArgument
from .cli_errors import exit_on_error
from .load import frontend_cost
from .load.figures import Slo, compute_figures
from .load.options import ENDLESS, LoadFlags, ServerFlags, build_load, describe_load
from .load.report import Cpu, LoadResult, require_matplotlib, show, write_json, write_plot
from .load.worker import RequestProgress, WorkerOutcome, run
from .server_process import CpuMeter, CpuSeconds, ServerAddress, own_server, parse_server_url, require_open

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
    server: Annotated[ServerFlags, Parameter("*")] = ServerFlags(),  # noqa: B008
    work: Annotated[LoadFlags, Parameter("*")] = LoadFlags(),  # noqa: B008
    output: Annotated[OutputOptions, Parameter("*")] = OutputOptions(),
) -> int:
    """Put a load to a server.

    Parameters
    ----------
    url
        http://host:port of a server that runs; otherwise give --model-repository or --checkpoint.
    """
    console = Console()
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


@app.command
def frontend(
    *,
    trial: Annotated[frontend_cost.FrontendTrial, Parameter("*")] = frontend_cost.FrontendTrial(),  # noqa: B008
    json: Path | None = None,
) -> int:
    """Measure the frontend over a fake engine, beside a bare handler that sends the same frames.

    Parameters
    ----------
    json
        Write the turns to this file.
    """
    console = Console()
    with exit_on_error():
        comparison = frontend_cost.compare(trial, lambda line: console.print(line, highlight=False))
        frontend_cost.show(console, comparison)
        if json:
            json.write_bytes(msgspec.json.encode(comparison))
    return 0


@contextmanager
def _place(url: str | None, server: ServerFlags, console: Console) -> Iterator[ServerAddress]:
    if sum(each is not None for each in (url, server.model_repository, server.checkpoint)) != 1:
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


def main() -> None:
    """The command. Asked to end, it leaves by the way that ends its server too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(app())


if __name__ == "__main__":
    main()
