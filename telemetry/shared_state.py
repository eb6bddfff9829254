"""The state that a server's clients share beside its models, and the contracts of core with it."""

from asyncio import AbstractEventLoop
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ..core.gateway import Administration, ModelLookup
from ..core.wait_graph import WaitGraph
from ..processes.client_shared_memory import SharedMemoryRegistry
from .custom_metrics import CustomMetrics
from .logging_setup import LogControl
from .roofline import StepRoofline
from .trace_settings import TraceControl


@dataclass(frozen=True, slots=True)
class SharedState:
    """Client shared memory, and the settings of logs and traces: v2's extensions, once for each server. `metrics`:
    those that models make themselves. `waits`: of models that ask others. `rooflines`: of language models by name, for
    explanations."""

    shared_memory: SharedMemoryRegistry = field(default_factory=SharedMemoryRegistry)
    logs: LogControl = field(default_factory=LogControl)
    traces: TraceControl = field(default_factory=TraceControl)
    metrics: CustomMetrics = field(default_factory=CustomMetrics)
    waits: WaitGraph = field(default_factory=WaitGraph)
    rooflines: Mapping[str, StepRoofline] = field(default_factory=dict)


class ServerLookup(ModelLookup, Protocol):
    """A `ModelLookup` with the state that the server's clients share."""

    @property
    def shared_state(self) -> SharedState: ...


class ServerAdministration(ServerLookup, Administration, Protocol):
    """An `Administration` with the state that the server's clients share."""


class ModelServices(NamedTuple):
    """What a model that asks others may use of its server: the way to them, and the event loop that both live in."""

    gateway: ServerAdministration
    loop: AbstractEventLoop
