"""One server's life: models load while doors are made, the doors open, and all ends together.

Doors open before models are loaded: whoever looks after the server sees that it lives, and that it is not ready.
"""

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from ..api.http.server import StopSignals, first_of
from ..core.request_context import Exchange
from ..core.trace_settings import Traces
from ..processes import gc_tuning
from ..processes.open_files import allow_files
from ..processes.scratch import sweep
from ..repository.gateway import Hub
from ..repository.watcher import Keeper
from ..telemetry.loop_lag import LoopLag
from ..telemetry.request_log import write_record
from ..telemetry.trace_file import TraceFile
from ..telemetry.tracing import Sampled
from .plan import Plan
from .ports import Ports, reserved
from .server_options import true
from .serving import close, serve

if TYPE_CHECKING:
    from ..api.prometheus import Source
    from ..telemetry.otlp import Tracer
    from .frontend_servers import Doors

log = logging.getLogger(__name__)

_TURN_SECONDS = 0.0005
"""How long another thread that computes may keep the event loop from the interpreter, each time it waits for it."""


async def run(plan: Plan, tracer: "Tracer | None") -> int:
    """Serve until somebody asks to stop; the status to exit with."""
    allow_files()
    swept = sweep()
    if swept:
        log.info("removed %d scratch directories of servers that were killed", swept)
    lag, traces = LoopLag(plan.server.max_loop_lag_secs), TraceFile(plan.commons.traces)
    hub = _hub(plan, lag, traces, tracer)
    keeper = plan.selection.keeper(hub)
    with (
        reserved(plan.server, plan.grpc, plan.entry.clouds) as ports,
        StopSignals() as stop,
        lag,
        closing(traces),
    ):
        hub.lifecycle.load_one_at_a_time()
        loading = asyncio.create_task(_load(plan, keeper, stop))
        try:
            frontend_servers = await _doors(plan, hub, ports, (hub.measure, lag.measure))
            patience = plan.server.exit_timeout_secs
            async with frontend_servers.metrics():
                servers = await frontend_servers.open()
                hub.lifecycle.load_side_by_side()
                await first_of(asyncio.shield(loading), servers.ended())
                if not await loading:
                    await close(hub, servers, stop, patience)
                    return 0 if stop.asked.is_set() else 1
                gc_tuning.settle()
                sys.setswitchinterval(_TURN_SECONDS)
                frontend_servers.announce()
                async with plan.selection.kept(keeper):
                    await serve(hub, servers, stop, patience)
            return 0
        finally:
            loading.cancel()
            hub.exit()
            await hub.unload()


def _hub(plan: Plan, lag: LoopLag, traces: TraceFile, tracer: "Tracer | None") -> Hub:
    strict, witnesses = true(plan.server.strict_readiness), _witnesses(plan.commons.traces, traces, tracer)
    return Hub(strict, lambda: not lag.stuck, witnesses, plan.commons, plan.selection.builder)


def _witnesses(traces: Traces, file: TraceFile, tracer: "Tracer | None") -> Sequence[Callable[[Exchange], None]]:
    """The tracer first: the record names the trace."""
    if tracer is None:
        return write_record, file
    if traces.settings().spans is not None:
        return Sampled(tracer, traces), write_record
    return tracer, write_record, file


async def _load(plan: Plan, keeper: Keeper, stop: StopSignals) -> bool:
    """Whether there is something to serve, and still someone who wants it."""
    loading = asyncio.create_task(plan.selection.load(keeper, strict=true(plan.server.exit_on_error)))
    await first_of(loading, stop.asked.wait())
    return not stop.asked.is_set() and loading.result()


async def _doors(plan: Plan, hub: Hub, ports: Ports, sources: "Sequence[Source]") -> "Doors":
    """Made while models load, which begins first; imports of what doors need go on beside it."""
    await asyncio.sleep(0)
    await asyncio.to_thread(_import_doors)
    from .frontend_servers import Doors

    return Doors(plan, hub, ports, sources)


def _import_doors() -> None:
    from . import frontend_servers  # noqa: F401
