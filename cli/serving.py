"""The end of serving: wait for somebody who asks for it, let finish what runs, close the doors."""

import logging

from ..api.http.server import Servers, StopSignals, first_of
from ..repository.gateway import Hub

log = logging.getLogger(__name__)


async def serve(hub: Hub, doors: Servers, stop: StopSignals, patience: float) -> None:
    """Return when somebody asked to stop, or a door ended by itself, and all are closed.

    What is new is refused from then on; what runs has `patience` seconds to finish, or until someone insists.
    """
    await first_of(stop.asked.wait(), doors.ended())
    await close(hub, doors, stop, patience)


async def close(hub: Hub, doors: Servers, stop: StopSignals, patience: float) -> None:
    """The same, and nobody needs to ask."""
    hub.exit()
    log.info("shutting down: up to %g s for running requests; another signal forces", patience)
    await first_of(hub.drained(), stop.insisted.wait(), timeout=patience)
    await doors.stop(force=hub.running > 0)
