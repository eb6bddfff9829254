"""The messages by which a worker and the hub tell each other of themselves: what is served, how their event loops
go, and when to end."""

import msgspec
from msgspec.structs import asdict

from ..processes.client_shared_memory import CudaMemoryRegion, SharedMemoryRegion
from ..telemetry.logging_setup import LogSettings
from ..telemetry.loop_lag import LoopState

BEAT_SECONDS = 1.0
"""Seconds between two heartbeats."""

HUNG_SECONDS = 60.0
"""Seconds of silence after which the other end is taken to hang."""


# From a worker


class SnapshotAcknowledged(msgspec.Struct, array_like=True, tag="taken", frozen=True):
    """The worker answers by this snapshot; its language models are ready here."""

    number: int


class WorkerListening(msgspec.Struct, array_like=True, tag="listening", frozen=True):
    """The worker's sockets take connections."""


class ReaderDelays(msgspec.Struct, array_like=True, frozen=True):
    """The backlog of readers of the language model `model` since the last report: tokens that came while others were
    unread, and the seconds of their streams."""

    model: int
    merged_tokens: int
    seconds: float


class WorkerState(msgspec.Struct, array_like=True, tag="state", frozen=True):
    """The state of the worker's event loop and its clients; answers a `Heartbeat`."""

    loop: LoopState
    readers: list[ReaderDelays]


class LogText(msgspec.Struct, array_like=True, tag="log", frozen=True):
    """Lines of the worker's log, as they are to be written."""

    text: str


# From the hub


class LogLevels(msgspec.Struct, array_like=True, frozen=True):
    """A `LogSettings`, but for the file, which the hub writes."""

    log_info: bool
    log_warning: bool
    log_error: bool
    log_verbose_level: int
    log_format: str

    @classmethod
    def of(cls, settings: LogSettings) -> "LogLevels":
        return cls(*(getattr(settings, name) for name in cls.__struct_fields__))

    def settings(self) -> LogSettings:
        return LogSettings(**asdict(self))


class HubSnapshot(msgspec.Struct, array_like=True, tag="snapshot", frozen=True):
    """The state of the hub that a worker goes by until the next one; `SnapshotAcknowledged` answers."""

    number: int
    ready: bool
    exiting: bool
    draining: bool

    has_routes: bool
    """Whether requests may be for routes, which may go by headers."""

    has_traces: bool
    """Whether requests may be traced, so that the hub wants to know at once when they end."""

    models: bytes
    """Pickled, see `snapshot.ServedModels`."""

    logs: LogLevels
    regions: list[SharedMemoryRegion]
    cuda_regions: list[CudaMemoryRegion]


class Heartbeat(msgspec.Struct, array_like=True, tag="beat", frozen=True):
    """The hub's loop turns; `WorkerState` answers."""


class StopWorker(msgspec.Struct, array_like=True, tag="stop", frozen=True):
    """Close the sockets and exit; with `force`, end what still runs."""

    force: bool
