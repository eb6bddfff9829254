"""The seam between the order of a rank's steps (`model_runner.py`) and the machine that computes them: a CPU
(`cpu_step_computer.py`), or a device that works off what is queued on it (`device_step_computer.py`)."""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from ...core.eager_reason import EagerReason
from ...scheduler.plan import MaskSource, StepPlan
from ..attention.backend import AttentionBackend
from ..gpu.graphs import StepGraphs
from ..layers.recurrent_state import StateSlots, StepSlotStates
from ..layers.step_context import StepAttention
from ..models.interfaces import Decoder
from ..step_batch import StepBatch
from .cross_cache import CrossCache
from .row_states import StepInputs
from .step_samples import StepSamples


class BegunStep(Protocol):
    """A step that a `StepComputer` has begun. It is settled and then read, or abandoned."""

    @property
    def tokens_follow(self) -> bool:
        """Whether its sampled tokens are in the rows, or will be there without the host when kernels come to the next
        step."""

    def make_masks(self) -> None:
        """Make the masks that kernels wait for, if any do. Called before another step begins behind this one."""

    def settle(self) -> None:
        """Compute what is left of it, choose the tokens that the host has to choose, and keep everything that the next
        step will overwrite."""

    def read(self) -> StepSamples | None:
        """The samples of a settled step; None: this rank samples none."""

    def abandon(self) -> None:
        """Let kernels go on that wait for masks which will not come."""


class RowStores(NamedTuple):
    """What layers keep of each row beside the paged cache, if they do."""

    states: StateSlots | None = None
    encoded: CrossCache | None = None

    def allocate(self, snapshots: int) -> None:
        """Make room for all rows, and for `snapshots` of states; nothing is left of earlier ones."""
        if self.states is not None:
            self.states.allocate(snapshots)
        if self.encoded is not None:
            self.encoded.allocate()

    def free(self) -> None:
        if self.states is not None:
            self.states.free()
        if self.encoded is not None:
            self.encoded.free()

    def begin_step(
        self, batch: StepBatch, plan: StepPlan | None = None
    ) -> tuple[StepSlotStates | None, StepAttention | None]:
        """The last arguments of the `StepContext` of a batch, which `plan` asks for, or nobody."""
        changes = () if plan is None else (plan.new, plan.state_saves, plan.state_restores)
        states = None if self.states is None else self.states.begin_step(batch, *changes)
        cross = None if self.encoded is None else self.encoded.begin_step(batch, () if plan is None else plan.new)
        return states, cross


NO_STORES = RowStores()


class StepComputer(Protocol):
    """Computes steps in the order in which they are begun, for one thread."""

    @property
    def decoder(self) -> Decoder: ...

    @property
    def attention(self) -> AttentionBackend: ...

    @property
    def stores(self) -> RowStores: ...

    @property
    def graphs(self) -> StepGraphs | None:
        """Decode steps that were recorded from launches; they refer to the cache and to the tables of the rows."""

    @property
    def eager_steps(self) -> Mapping[EagerReason, int]:
        """Steps of a GPU that were launched without a look at `graphs`."""

    def follows_unread(self, plan: StepPlan) -> bool:
        """Whether the step of `plan` may begin before the result of the step before it is read."""

    def begin(self, plan: StepPlan, inputs: StepInputs, masks: MaskSource | None) -> BegunStep:
        """Begin the step of `plan`, whose rows are up to date. `masks` makes the masks of `inputs.masked`, and is
        called once, when all that can be computed without them has begun."""
