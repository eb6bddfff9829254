"""The composition root: read the command line, build, run, stop.

Heavy imports wait until they are needed: `charonia --help` is for people.
"""

import asyncio
import os
import sys
from contextlib import AbstractAsyncContextManager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from . import __version__
from .api.announcement import reachable, say_ready, url
from .api.grpc_options import GrpcOptions
from .api.grpc_tls import tls_files
from .api.http_options import HttpOptions
from .api.keys import KeyOptions, Keyring, read_keys
from .api.options import ServerOptions, true
from .api.tls import KeyPair, key_pair
from .core import garbage
from .core.errors import CharoniaError, InvalidArgument
from .core.logs import logging_as
from .core.metrics_config import MetricsConfig, read_metrics_config
from .core.tracing import endpoint_of, tracing
from .engine.options import EngineOptions
from .repository.options import CheckOptions, RepositoryOptions

if TYPE_CHECKING:
    from .api.grpc_server import GrpcServer
    from .api.http_rules import HttpRules
    from .api.metadata import ServerInfo
    from .api.metrics import Source
    from .api.ports import Ports
    from .api.server import StopSignals
    from .core.commons import Commons
    from .core.log_settings import Logs
    from .core.looplag import LoopLag
    from .core.otlp import Tracer
    from .core.trace_file import TraceFile
    from .repository.gateway import Hub
    from .repository.selection import Selection
    from .repository.startup import Keeper

app = App(name="charonia", version=__version__, help="A streaming, LLM-centric inference server.")


@app.command
def serve(
    model: str | None = None,
    /,
    *,
    repository: Annotated[RepositoryOptions, Parameter("*")] = RepositoryOptions(),  # noqa: B008
    server: Annotated[ServerOptions, Parameter("*")] = ServerOptions(),  # noqa: B008
    http: Annotated[HttpOptions, Parameter("*")] = HttpOptions(),  # noqa: B008
    access: Annotated[KeyOptions, Parameter("*")] = KeyOptions(),  # noqa: B008
    grpc: Annotated[GrpcOptions, Parameter("*")] = GrpcOptions(),  # noqa: B008
    engine: Annotated[EngineOptions, Parameter("*")] = EngineOptions(),  # noqa: B008
) -> int:
    """Serve models until SIGTERM or SIGINT; a second one forces.

    Parameters
    ----------
    model
        A checkpoint directory, a hub id, or a model repository.
    """
    import uvloop

    with logging_as(server.log_settings) as logs:
        try:
            tls_files(grpc)  # what is wrong with them is told before anything is loaded
            metrics = read_metrics_config(server.metrics_config)
            selection = _select(model, repository, engine, metrics)
            plan = _Plan(selection, _commons(server, logs), server, grpc, _entry(server, http, access), metrics)
            with tracing(endpoint_of(server.otlp_traces_endpoint, os.environ), __version__) as tracer:
                return uvloop.run(_run(plan, tracer))
        except CharoniaError as error:
            print(f"charonia: {error.message}", file=sys.stderr)
            return 1


@app.command
def check(
    repository: str | None = None,
    /,
    *,
    tensorrt_llm: Annotated[bool, Parameter(negative=())] = False,
    options: Annotated[CheckOptions, Parameter("*")] = CheckOptions(),  # noqa: B008
) -> int:
    """Say what is wrong with a model repository, without serving it; the status is 1 if a model would not load.

    Parameters
    ----------
    repository
        Directory of models; with --tensorrt-llm, a checkpoint to generate with.
    tensorrt_llm
        Instead, hold the installed TensorRT-LLM against what its adapter expects.
    """
    if tensorrt_llm:
        from .engine.trtllm.check import report as report_package

        return report_package(repository)
    return _check_repository(repository, options)


def _check_repository(repository: str | None, options: CheckOptions) -> int:
    from .repository.check import report

    try:
        if repository is None:
            raise InvalidArgument("nothing to check: name a model repository")
        return report(Path(repository), options)
    except CharoniaError as error:
        print(f"charonia: {error.message}", file=sys.stderr)
        return 1


@dataclass(frozen=True, slots=True)
class _Entry:
    """Who may come in over HTTP or gRPC, and how."""

    keys: Keyring
    rules: "HttpRules"
    tls: KeyPair | None


@dataclass(frozen=True, slots=True)
class _Plan:
    """What to serve and how."""

    selection: "Selection"
    commons: "Commons"
    server: ServerOptions
    grpc: GrpcOptions
    entry: _Entry
    metrics: MetricsConfig


def _select(
    model: str | None, repository: RepositoryOptions, engine: EngineOptions, metrics: MetricsConfig
) -> "Selection":
    from .repository.selection import select

    given = {name: str(value) for name, value in engine.given().items()}
    return select(model, repository, given, metrics.quantiles if metrics.summaries else ())


def _commons(options: ServerOptions, logs: "Logs") -> "Commons":
    from .core.commons import Commons
    from .core.shared_memory import Regions
    from .core.trace_settings import Traces, read_trace_config

    return Commons(Regions(true(options.allow_client_shm)), logs, Traces(read_trace_config(options.trace_config)))


def _entry(server: ServerOptions, http: HttpOptions, access: KeyOptions) -> _Entry:
    from .api.http_rules import read_rules

    tls = key_pair(server.http_server_cert, server.http_server_key, "--http-server")
    return _Entry(read_keys(access), read_rules(http), tls)


async def _run(plan: _Plan, tracer: "Tracer | None") -> int:
    """Serve; the status to exit with."""
    from .api.ports import reserved
    from .api.server import StopSignals
    from .core.looplag import LoopLag
    from .core.trace_file import TraceFile

    lag, traces = LoopLag(plan.server.max_loop_lag_secs), TraceFile(plan.commons.traces)
    hub = _hub(plan, lag, traces, tracer)
    keeper = plan.selection.keeper(hub)
    with reserved(plan.server, plan.grpc) as ports, StopSignals() as stop, lag, closing(traces):
        loading = asyncio.create_task(_load(plan, keeper, stop))
        try:
            grpc = await _grpc_door(plan, hub, ports)
            if not await loading:
                return 0 if stop.asked.is_set() else 1
            async with _metrics_served(plan, (hub.measure, lag.measure), ports), plan.selection.kept(keeper):
                await _serve(plan, hub, grpc, ports, stop)
            return 0
        finally:
            loading.cancel()
            hub.exit()
            await hub.unload()


def _hub(plan: _Plan, lag: "LoopLag", traces: "TraceFile", tracer: "Tracer | None") -> "Hub":
    from .core.records import write_record
    from .repository.gateway import Hub

    # The tracer first: the record names the trace.
    witnesses = (write_record, traces) if tracer is None else (tracer, write_record, traces)
    strict = true(plan.server.strict_readiness)
    return Hub(strict, lambda: not lag.stuck, witnesses, plan.commons, plan.selection.builder)


async def _load(plan: _Plan, keeper: "Keeper", stop: "StopSignals") -> bool:
    """Whether there is something to serve, and still someone who wants it."""
    from .api.server import first_of

    loading = asyncio.create_task(plan.selection.load(keeper, strict=true(plan.server.exit_on_error)))
    await first_of(loading, stop.asked.wait())
    return not stop.asked.is_set() and loading.result()


async def _grpc_door(plan: _Plan, hub: "Hub", ports: "Ports") -> "GrpcServer":
    """Made while models load, which begins first; imports of what all doors need go on beside it."""
    await asyncio.sleep(0)
    await asyncio.to_thread(_import_doors)
    from .api.grpc_server import GrpcServer

    return GrpcServer(hub, _info(plan.server), plan.grpc, ports.grpc, plan.entry.keys)


def _import_doors() -> None:
    from .api import app, grpc_server, metrics_server, serving  # noqa: F401


def _metrics_served(plan: _Plan, sources: "tuple[Source, ...]", ports: "Ports") -> AbstractAsyncContextManager[None]:
    from .api.metrics import build_registry
    from .api.metrics_server import metrics_served, of_machine

    vllm = plan.server.metrics_names == "vllm"
    registry = build_registry((*sources, *of_machine(plan.server)), vllm, plan.metrics.hidden)
    return metrics_served(registry, ports.metrics)


async def _serve(plan: _Plan, hub: "Hub", grpc: "GrpcServer", ports: "Ports", stop: "StopSignals") -> None:
    from .api.app import build_app
    from .api.server import HttpServer, Servers
    from .api.serving import serve

    options, entry = plan.server, plan.entry
    app = build_app(hub, _info(options), entry.keys, entry.rules)
    doors = Servers(HttpServer(app, ports.http, access_log=True, tls=entry.tls), grpc)
    garbage.settle()
    await doors.start()
    print(f"gRPC on {reachable(plan.grpc.grpc_address, grpc.port)}")
    say_ready(hub, url(options.http_address, ports.http.getsockname()[1], entry.tls is not None), bool(entry.keys))
    await serve(hub, doors, stop, options.exit_timeout_secs)


def _info(options: ServerOptions) -> "ServerInfo":
    from .api.metadata import ServerInfo

    return ServerInfo(options.id, __version__, options.http_max_input_size)


def main() -> None:
    """The `charonia` command."""
    try:
        status = app()
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python would complain once more at its end
        print("charonia: nobody reads the standard output any more", file=sys.stderr)
        status = 1
    sys.exit(status)


if __name__ == "__main__":
    main()
