"""The state that a server's clients share beside its models, and the gateway that has it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..core.gateway import ChangeableRoutes, Gateway, Rollouts
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


class ServerGateway(Gateway, Protocol):
    """The gateway as the endpoints of v2's extensions know it."""

    @property
    def shared_state(self) -> SharedState: ...

    @property
    def route_control(self) -> ChangeableRoutes: ...

    @property
    def rollouts(self) -> Rollouts: ...

    def requests_in_flight(self) -> int:
        """How many requests to models are being answered."""

    async def tokenizer_info(self, name: str) -> dict[str, Any]:
        """What the checkpoint of a language model says of its tokenizer. Raises as `model_config`, and
        `InvalidArgument` for another model."""
