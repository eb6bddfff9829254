"""One server's life: models load while doors are made, the doors open, and all ends together.

Doors open before models are loaded: whoever looks after the server sees that it lives, and that it is not ready.
"""

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from ..api.http.server import StopSignals, wait_for_first
from ..core.request_context import RequestContext
from ..core.trace_settings import TraceControl
from ..processes import gc_tuning
from ..processes.open_files import raise_open_file_limit
from ..processes.scratch import remove_abandoned_scratch
from ..repository.gateway import InProcessGateway
from ..repository.watcher import RepositoryWatcher
from ..telemetry.loop_lag import LoopLag
from ..telemetry.request_log import log_request
from ..telemetry.trace_file import TraceFileWriter
from ..telemetry.tracing import SamplingTracer
from .plan import ServePlan
from .ports import ReservedPorts, reserve_ports
from .server_options import is_true
from .serving import serve_until_stopped, shut_down

if TYPE_CHECKING:
    from ..api.prometheus import MetricsSource
    from ..telemetry.otlp import OtlpTracer
    from .frontend_servers import FrontendServers

log = logging.getLogger(__name__)

_TURN_SECONDS = 0.0005
"""How long another thread that computes may keep the event loop from the interpreter, each time it waits for it."""


async def run(plan: ServePlan, tracer: "OtlpTracer | None") -> int:
    """Serve until somebody asks to stop; the status to exit with."""
    raise_open_file_limit()
    swept = remove_abandoned_scratch()
    if swept:
        log.info("removed %d scratch directories of servers that were killed", swept)
    lag, traces = LoopLag(plan.server.max_loop_lag_secs), TraceFileWriter(plan.shared.traces)
    hub = _hub(plan, lag, traces, tracer)
    keeper = plan.selection.create_watcher(hub)
    with (
        reserve_ports(plan.server, plan.grpc, plan.endpoints.clouds) as ports,
        StopSignals() as stop,
        lag,
        closing(traces),
    ):
        hub.lifecycle.load_sequentially()
        loading = asyncio.create_task(_load(plan, keeper, stop))
        try:
            frontend_servers = await _doors(plan, hub, ports, (hub.measurements, lag.measure))
            patience = plan.server.exit_timeout_secs
            async with frontend_servers.metrics():
                servers = await frontend_servers.start()
                hub.lifecycle.load_concurrently()
                await wait_for_first(asyncio.shield(loading), servers.ended())
                if not await loading:
                    await shut_down(hub, servers, stop, patience)
                    return 0 if stop.stop_requested.is_set() else 1
                gc_tuning.freeze_after_startup()
                sys.setswitchinterval(_TURN_SECONDS)
                frontend_servers.print_addresses()
                async with plan.selection.polling(keeper):
                    await serve_until_stopped(hub, servers, stop, patience)
            return 0
        finally:
            loading.cancel()
            hub.begin_exit()
            await hub.unload_all()


def _hub(plan: ServePlan, lag: LoopLag, traces: TraceFileWriter, tracer: "OtlpTracer | None") -> InProcessGateway:
    strict, witnesses = is_true(plan.server.strict_readiness), _witnesses(plan.shared.traces, traces, tracer)
    return InProcessGateway(strict, lambda: not lag.stuck, witnesses, plan.shared, plan.selection.builder)


def _witnesses(
    traces: TraceControl, file: TraceFileWriter, tracer: "OtlpTracer | None"
) -> Sequence[Callable[[RequestContext], None]]:
    """The tracer first: the record names the trace."""
    if tracer is None:
        return log_request, file
    if traces.settings().spans is not None:
        return SamplingTracer(tracer, traces), log_request
    return tracer, log_request, file


async def _load(plan: ServePlan, keeper: RepositoryWatcher, stop: StopSignals) -> bool:
    """Whether there is something to serve, and still someone who wants it."""
    loading = asyncio.create_task(plan.selection.load_startup_models(keeper, strict=is_true(plan.server.exit_on_error)))
    await wait_for_first(loading, stop.stop_requested.wait())
    return not stop.stop_requested.is_set() and loading.result()


async def _doors(
    plan: ServePlan, hub: InProcessGateway, ports: ReservedPorts, sources: "Sequence[MetricsSource]"
) -> "FrontendServers":
    """Made while models load, which begins first; imports of what doors need go on beside it."""
    await asyncio.sleep(0)
    await asyncio.to_thread(_import_doors)
    from .frontend_servers import FrontendServers

    return FrontendServers(plan, hub, ports, sources)


def _import_doors() -> None:
    from . import frontend_servers  # noqa: F401
