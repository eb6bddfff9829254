"""One server's life: models load while doors are made, the doors open, and all ends together.

Doors open before models are loaded: whoever looks after the server sees that it lives, and that it is not ready.
"""

import asyncio
import logging
import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from ..api.options import true
from ..api.ports import Ports, reserved
from ..api.server import StopSignals, first_of
from ..api.serving import close, serve
from ..core import garbage
from ..core.exchange import Exchange
from ..core.looplag import LoopLag
from ..core.open_files import allow_files
from ..core.records import write_record
from ..core.scratch import sweep
from ..core.trace_file import TraceFile
from ..core.trace_settings import Traces
from ..core.tracing import Sampled
from ..repository.gateway import Hub
from ..repository.startup import Keeper
from .plan import Plan

if TYPE_CHECKING:
    from ..api.metrics import Source
    from ..core.otlp import Tracer
    from .doors import Doors

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
            doors = await _doors(plan, hub, ports, (hub.measure, lag.measure))
            patience = plan.server.exit_timeout_secs
            async with doors.metrics():
                servers = await doors.open()
                hub.lifecycle.load_side_by_side()
                await first_of(asyncio.shield(loading), servers.ended())
                if not await loading:
                    await close(hub, servers, stop, patience)
                    return 0 if stop.asked.is_set() else 1
                garbage.settle()
                sys.setswitchinterval(_TURN_SECONDS)
                doors.announce()
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
    from .doors import Doors

    return Doors(plan, hub, ports, sources)


def _import_doors() -> None:
    from . import doors  # noqa: F401
