"""The end of serving: wait for somebody who asks for it, let finish what runs, close the doors."""

import logging

from ..api.http.server import ServerGroup, StopSignals, wait_for_first
from ..repository.gateway import InProcessGateway

log = logging.getLogger(__name__)


async def serve_until_stopped(hub: InProcessGateway, doors: ServerGroup, stop: StopSignals, patience: float) -> None:
    """Return when somebody asked to stop, or a door ended by itself, and all are closed.

    What is new is refused from then on; what runs has `patience` seconds to finish, or until someone insists.
    """
    await wait_for_first(stop.stop_requested.wait(), doors.ended())
    await shut_down(hub, doors, stop, patience)


async def shut_down(hub: InProcessGateway, doors: ServerGroup, stop: StopSignals, patience: float) -> None:
    """The same, and nobody needs to ask."""
    hub.begin_exit()
    log.info("shutting down: up to %g s for running requests; another signal forces", patience)
    await wait_for_first(hub.wait_drained(), stop.force_requested.wait(), timeout=patience)
    await doors.stop(force=hub.requests_in_flight > 0)
