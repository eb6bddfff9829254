"""The composition root: read the command line, build, run, stop.

Heavy imports wait until they are needed: `charonia --help` is for people.
"""

import asyncio
import logging
import os
import sys
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, closing, nullcontext
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
from .core.errors import CharoniaError, InvalidArgument
from .core.logs import logging_as
from .core.metrics_config import MetricsConfig, read_metrics_config
from .core.tracing import endpoint_of, tracing
from .engine.options import EngineOptions
from .repository.options import CheckOptions, RepositoryOptions

if TYPE_CHECKING:
    import socket

    from .api.grpc_server import GrpcServer
    from .api.http_rules import HttpRules
    from .api.metadata import ServerInfo
    from .api.metrics import Source
    from .api.server import Servers, StopSignals
    from .core.commons import Commons
    from .core.log_settings import Logs
    from .core.otlp import Tracer
    from .repository.gateway import Hub
    from .repository.selection import Selection
    from .repository.startup import Keeper

log = logging.getLogger("charonia.main")

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
            plan = _Plan(selection, server, grpc, _rules(http), read_keys(access), metrics, _tls(server))
            with tracing(endpoint_of(server.otlp_traces_endpoint, os.environ), __version__) as tracer:
                return uvloop.run(_run(plan, tracer, _commons(server, logs)))
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
class _Plan:
    """What to serve and how."""

    selection: "Selection"
    server: ServerOptions
    grpc: GrpcOptions
    rules: "HttpRules"
    keys: Keyring
    metrics: MetricsConfig
    tls: KeyPair | None = None


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


async def _run(plan: _Plan, tracer: "Tracer | None", commons: "Commons") -> int:
    from .api.server import StopSignals, bind
    from .core.looplag import LoopLag
    from .core.records import write_record
    from .core.trace_file import TraceFile
    from .repository.gateway import Hub

    options = plan.server
    lag = LoopLag(options.max_loop_lag_secs)
    # The tracer first: the record names the trace.
    traces = TraceFile(commons.traces)
    witnesses = (write_record, traces) if tracer is None else (tracer, write_record, traces)
    hub = Hub(true(options.strict_readiness), lambda: not lag.stuck, witnesses, commons, plan.selection.builder)
    keeper = plan.selection.keeper(hub)
    with (
        bind(options.http_address, options.http_port, "--http-port") as sock,
        bind(plan.grpc.grpc_address, plan.grpc.grpc_port, "--grpc-port") as rpc,
        _metrics_socket(options) as metrics,
        StopSignals() as stop,
        lag,
        closing(traces),
    ):
        loading = asyncio.create_task(_load(plan.selection, keeper, stop, true(options.exit_on_error)))
        try:
            grpc = await _grpc_door(plan, hub, rpc)
            if not await loading:
                return 0 if stop.asked.is_set() else 1
            sources = hub.measure, lag.measure, *_machine(options)
            async with _metrics(plan, metrics, sources), plan.selection.kept(keeper):
                await _serve(plan, hub, sock, grpc, stop)
            return 0
        finally:
            loading.cancel()
            hub.exit()
            await hub.unload()


async def _grpc_door(plan: _Plan, hub: "Hub", sock: "socket.socket") -> "GrpcServer":
    """Made while models load, which begins first; imports of what all doors need go on beside it."""
    await asyncio.sleep(0)
    await asyncio.to_thread(_import_doors)
    from .api.grpc_server import GrpcServer

    return GrpcServer(hub, _info(plan.server), plan.grpc, sock, plan.keys)


def _import_doors() -> None:
    from .api import app, grpc_server, metrics  # noqa: F401


def _metrics_socket(options: ServerOptions) -> "AbstractContextManager[socket.socket | None]":
    from .api.server import bind

    if not true(options.allow_metrics):
        return nullcontext()
    return bind(options.metrics_address or options.http_address, options.metrics_port, "--metrics-port")


def _machine(options: ServerOptions) -> "Iterator[Source]":
    """What is measured of the machine."""
    from .core.gpus import Gpus
    from .core.machine import Machine

    if true(options.allow_cpu_metrics):
        yield Machine().measure
    if true(options.allow_gpu_metrics):
        yield Gpus().measure


@asynccontextmanager
async def _metrics(plan: _Plan, sock: "socket.socket | None", sources: "Iterable[Source]") -> AsyncIterator[None]:
    """Serve metrics meanwhile, if somebody wants them."""
    from .api.metrics import MetricsApp, build_registry
    from .api.server import HttpServer

    if sock is None:
        yield
        return
    registry = build_registry(sources, plan.server.metrics_names == "vllm", plan.metrics.hidden)
    server = HttpServer(MetricsApp(registry), sock, access_log=False)
    await server.start()
    print(f"Metrics on {url(*sock.getsockname()[:2])}/metrics")
    try:
        yield
    finally:
        await server.stop(force=True)


async def _load(selection: "Selection", keeper: "Keeper", stop: "StopSignals", strict: bool) -> bool:
    """Whether there is something to serve, and still someone who wants it. `strict`: all of it, or nothing."""
    from .api.server import first_of
    from .repository.display import Display

    with Display() as display:
        loading = asyncio.create_task(keeper.start(selection.names, display))
        await first_of(loading, stop.asked.wait())
    if stop.asked.is_set():
        return False
    if not loading.result() and strict and not selection.single:
        print("charonia: a model failed to load; --exit-on-error=false serves the others", file=sys.stderr)
    return loading.result() or not (strict or selection.single)


async def _serve(plan: _Plan, hub: "Hub", sock: "socket.socket", grpc: "GrpcServer", stop: "StopSignals") -> None:
    from .api.app import build_app
    from .api.server import HttpServer, Servers, first_of

    options = plan.server
    door = build_app(hub, _info(options), plan.keys, plan.rules)
    http = HttpServer(door, sock, access_log=True, tls=plan.tls)
    server = Servers(http, grpc)
    await server.start()
    print(f"gRPC on {reachable(plan.grpc.grpc_address, grpc.port)}")
    say_ready(hub, url(options.http_address, sock.getsockname()[1], plan.tls is not None), bool(plan.keys))
    await first_of(stop.asked.wait(), server.ended())
    await _drain(hub, server, stop, options.exit_timeout_secs)


async def _drain(hub: "Hub", server: "Servers", stop: "StopSignals", seconds: float) -> None:
    """Refuse what is new, let finish what runs; then, or when someone insists, stop."""
    from .api.server import first_of

    hub.exit()
    log.info("shutting down: up to %g s for running requests; another signal forces", seconds)
    await first_of(hub.drained(), stop.insisted.wait(), timeout=seconds)
    await server.stop(force=hub.running > 0)


def _info(options: ServerOptions) -> "ServerInfo":
    from .api.metadata import ServerInfo

    return ServerInfo(options.id, __version__, options.http_max_input_size)


def _rules(options: HttpOptions) -> "HttpRules":
    from .api.http_rules import read_rules

    return read_rules(options)


def _tls(options: ServerOptions) -> KeyPair | None:
    return key_pair(options.http_server_cert, options.http_server_key, "--http-server")


def main() -> None:
    """The `charonia` command."""
    sys.exit(app())


if __name__ == "__main__":
    main()
