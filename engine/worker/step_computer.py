"""The seam between the order of a rank's steps (`model_runner.py`) and the machine that computes them: a CPU
(`cpu_step_computer.py`), or a device that works off what is queued on it (`device_step_computer.py`)."""

from typing import Protocol

from ...scheduler.plan import MaskSource, StepPlan
from ..attention.backend import AttentionBackend
from ..gpu.graphs import DecodeGraphs
from ..layers.recurrent_state import StateSlots, StepSlotStates
from ..layers.step_context import StepAttention
from ..models.interfaces import Decoder
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


class StepComputer(Protocol):
    """Computes steps in the order in which they are begun, for one thread."""

    @property
    def decoder(self) -> Decoder: ...

    @property
    def attention(self) -> AttentionBackend: ...

    @property
    def states(self) -> StateSlots | None:
        """The states of its layers, if any keep some."""

    @property
    def encoded(self) -> CrossCache | None:
        """What its layers attend to beside tokens, if they do."""

    @property
    def graphs(self) -> DecodeGraphs | None:
        """Decode steps that were recorded from launches; they refer to the cache and to the tables of the rows."""

    def follows_unread(self, plan: StepPlan) -> bool:
        """Whether the step of `plan` may begin before the result of the step before it is read."""

    def begin(
        self,
        inputs: StepInputs,
        masks: MaskSource | None,
        states: StepSlotStates | None = None,
        cross: StepAttention | None = None,
    ) -> BegunStep:
        """Begin a step whose rows are up to date. `masks` makes the masks of `inputs.masked`, and is called once, when
        all that can be computed without them has begun. `states` and `cross`: of the step, begun by the stores of
        `states` and `encoded`."""
