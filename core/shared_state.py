"""What clients lend and set, once per server: regions of shared memory, settings of logs and traces."""

from dataclasses import dataclass, field

from .client_shared_memory import Regions
from .log_settings import Logs
from .trace_settings import Traces


@dataclass(frozen=True, slots=True)
class Commons:
    """Doors ask and change it through `Gateway.commons`; the composition root makes it."""

    regions: Regions = field(default_factory=Regions)
    logs: Logs = field(default_factory=Logs)
    traces: Traces = field(default_factory=Traces)
