"""The life of one server: models load while endpoints are made, endpoints open, and all ends together.

Endpoints open before models are loaded: an orchestrator sees that the server lives, and that it is not ready.
"""

import asyncio
import importlib
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from ..core.extensions import describe_absent
from ..core.request_context import RequestContext
from ..core.tasks import wait_for_first
from ..processes import gc_tuning
from ..processes.child_process import drop_prepared_children
from ..processes.host import map_large_blocks_separately, raise_open_file_limit
from ..processes.scratch import remove_abandoned_scratch
from ..repository.gateway import InProcessGateway
from ..repository.state_directory import StateDirectory
from ..repository.watcher import RepositoryWatcher
from ..telemetry.loop_lag import LoopLag
from ..telemetry.request_log import log_request
from ..telemetry.request_trace import TraceFileWriter
from ..telemetry.trace_settings import TraceControl
from ..telemetry.tracing import SamplingTracer
from .model_host import ModelHost
from .options import is_true
from .plan import ServePlan
from .ports import ReservedPorts, reserve_ports

if TYPE_CHECKING:
    from ..api.prometheus import MetricsSource
    from ..telemetry.otlp import OtlpTracer
    from .frontend_servers import FrontendServers

log = logging.getLogger(__name__)

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_TURN_SECONDS = 0.0005
"""Seconds that a thread which computes may keep the event loop's thread from the interpreter at a time."""


class StopSignals:
    """SIGINT and SIGTERM as two events: the first asks to stop, the second to force. A third ends the process.

    The interpreter's handlers and not the event loop's, which may be stuck. From the second signal on, and after the
    block, there are none: then the system ends the process, whatever it does.
    """

    def __init__(self) -> None:
        self.stop_requested = asyncio.Event()
        self.force_requested = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._next = iter((self.stop_requested, self.force_requested))

    def __enter__(self) -> "StopSignals":
        for number in _SIGNALS:
            signal.signal(number, self._receive)
        return self

    def __exit__(self, *_: object) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)

    def _receive(self, *_: object) -> None:
        event = next(self._next)
        self._loop.call_soon_threadsafe(event.set)
        if event is self.force_requested:
            self.__exit__()


async def run(plan: ServePlan, tracer: "OtlpTracer | None") -> int:
    """Serve until a signal asks to stop, or a server ends by itself; the status to exit with."""
    raise_open_file_limit()
    map_large_blocks_separately()
    swept = remove_abandoned_scratch()
    if swept:
        log.info("removed %d scratch directories of servers that were killed", swept)
    options, lag = plan.options.server, LoopLag(plan.options.server.max_loop_lag_secs)
    traces = TraceFileWriter(plan.shared.traces)
    strict = is_true(options.strict_readiness)
    listeners = _end_listeners(plan.shared.traces, traces, tracer)
    models = ModelHost(plan.selection, plan.shared, plan.observers, strict, lambda: not lag.stuck, listeners)
    gateway, watcher = models.gateway, models.watcher
    reserved = reserve_ports(options, plan.options.grpc, plan.endpoints.clouds, plan.frontends.most > 1)
    with reserved as ports, StopSignals() as stop, lag, closing(traces):
        gateway.lifecycle.load_sequentially()
        loading = asyncio.create_task(_load(plan, watcher, stop))
        try:
            sources = *models.sources, lag.measure
            servers = await _make_servers(plan, gateway, ports, sources)
            async with servers.metrics():
                await servers.start()
                gc_tuning.freeze_imports()
                gateway.lifecycle.load_concurrently()
                await wait_for_first(asyncio.shield(loading), servers.ended())
                if not await loading:
                    await _shut_down(gateway, servers, stop, options.exit_timeout_secs)
                    return 0 if stop.stop_requested.is_set() else 1
                drop_prepared_children()
                plan.selection.keep_spare_cores()
                gc_tuning.collect_and_freeze(frozen_too=False)
                sys.setswitchinterval(_TURN_SECONDS)
                await wait_for_first(servers.settle(), stop.stop_requested.wait())
                async with plan.selection.polling(watcher):
                    async with servers.extensions():
                        _tell_of_absent_extensions(plan.selection.state)
                        servers.print_addresses()
                        await wait_for_first(stop.stop_requested.wait(), servers.ended())
                        await _drain(gateway, servers, stop, options.drain_secs)
                        gateway.begin_exit()
                    await _shut_down(gateway, servers, stop, options.exit_timeout_secs)
            return 0
        finally:
            loading.cancel()
            await models.close()


def _end_listeners(
    traces: TraceControl, file: TraceFileWriter, tracer: "OtlpTracer | None"
) -> Sequence[Callable[[RequestContext], None]]:
    """Called in this order with each request that has ended: the log's record names the trace that the tracer made."""
    traces.send_spans(tracer is not None)
    settings = traces.settings()
    files = [file] if settings.trace_file and settings.spans is None else []
    if tracer is None:
        return log_request, *files
    if settings.spans is not None:
        return SamplingTracer(tracer, traces), log_request
    return tracer, log_request, *files


def _tell_of_absent_extensions(state: StateDirectory | None) -> None:
    """Log which of our packages are not installed, and warn of what an earlier server kept for one."""
    absent = describe_absent("charonia.routes", "charonia.request_observers", "charonia.backends", "charonia.commands")
    if absent:
        log.info("endpoints, flags, backends or commands are missing%s", absent)
    for name in () if state is None else state.unread():
        log.warning("nothing goes on with the '%s' that --state-dir keeps%s", name, describe_absent("charonia.routes"))


async def _load(plan: ServePlan, watcher: RepositoryWatcher, stop: StopSignals) -> bool:
    """Load the models; whether there is something to serve, and no signal to stop came meanwhile."""
    strict = is_true(plan.options.server.exit_on_error)
    loading = asyncio.create_task(plan.selection.load_startup_models(watcher, strict))
    await wait_for_first(loading, stop.stop_requested.wait())
    return not stop.stop_requested.is_set() and loading.result()


async def _make_servers(
    plan: ServePlan, gateway: InProcessGateway, ports: ReservedPorts, sources: "Sequence[MetricsSource]"
) -> "FrontendServers":
    """Made while models load, which begins first; the imports of the endpoints go on beside it."""
    await asyncio.sleep(0)
    await asyncio.to_thread(importlib.import_module, ".frontend_servers", __package__)
    from .frontend_servers import FrontendServers

    return FrontendServers(plan, gateway, ports, sources)


async def _drain(gateway: InProcessGateway, servers: "FrontendServers", stop: StopSignals, seconds: float) -> None:
    """Be unready for so long before requests are refused, or until a second signal: who routes requests learns of it
    late."""
    gateway.begin_drain()
    if seconds:
        log.info("draining: not ready, and requests are taken for another %g s", seconds)
        await wait_for_first(stop.force_requested.wait(), servers.ended(), timeout=seconds)


async def _shut_down(gateway: InProcessGateway, servers: "FrontendServers", stop: StopSignals, timeout: float) -> None:
    """Refuse new requests, wait for running ones, `timeout` seconds or until a second signal, and close the servers."""
    gateway.begin_exit()
    log.info("shutting down: up to %g s for running requests; another signal forces", timeout)
    await wait_for_first(gateway.in_flight.wait_drained(), stop.force_requested.wait(), timeout=timeout)
    await servers.stop(force=gateway.in_flight.count > 0)
