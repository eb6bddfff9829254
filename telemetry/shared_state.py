"""The state that a server's clients share, and core's contracts with it."""

from asyncio import AbstractEventLoop
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from ..core.gateway import Administration, ModelLookup
from ..core.runtime import LoadInterruption
from ..core.wait_graph import WaitGraph
from ..processes.client_shared_memory import SharedMemoryRegistry
from .custom_metrics import CustomMetrics
from .logging_setup import LogControl
from .roofline import StepRoofline
from .trace_settings import TraceControl


@dataclass(frozen=True, slots=True)
class SharedState:
    """The state of v2's extensions, once for each server."""

    shared_memory: SharedMemoryRegistry = field(default_factory=SharedMemoryRegistry)
    logs: LogControl = field(default_factory=LogControl)
    traces: TraceControl = field(default_factory=TraceControl)
    metrics: CustomMetrics = field(default_factory=CustomMetrics)
    """The metrics that models make themselves."""
    waits: WaitGraph = field(default_factory=WaitGraph)
    """The waits of models that ask others."""
    rooflines: Mapping[str, StepRoofline] = field(default_factory=dict)
    """The rooflines of language models by name, for explanations."""


class ServerLookup(ModelLookup, Protocol):
    """A `ModelLookup` with the shared state."""

    @property
    def shared_state(self) -> SharedState: ...


class ServerAdministration(ServerLookup, Administration, Protocol):
    """An `Administration` with the shared state."""


@dataclass(frozen=True, slots=True)
class ModelServices:
    """What one version of a model that asks others may use: the server's models, and the event loop of both."""

    gateway: ServerAdministration
    loop: AbstractEventLoop
    interruption: LoadInterruption = field(default_factory=LoadInterruption)
    """Ends the version's load, and the completion of its config."""
