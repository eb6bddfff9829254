"""What clients lend and set, once per server: regions of shared memory, settings of logs and traces."""

from dataclasses import dataclass, field

from .client_shared_memory import SharedMemoryRegistry
from .log_settings import LogControl
from .trace_settings import TraceControl


@dataclass(frozen=True, slots=True)
class SharedState:
    """Doors ask and change it through `Gateway.commons`; the composition root makes it."""

    shared_memory: SharedMemoryRegistry = field(default_factory=SharedMemoryRegistry)
    logs: LogControl = field(default_factory=LogControl)
    traces: TraceControl = field(default_factory=TraceControl)
