"""The seam between the step loop and whatever computes a step."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from ...core.errors import CharoniaError
from ...scheduler.plan import StepPlan, StepResult

ProgressCallback = Callable[[str, float], None]
"""Called with (phase, fraction done from 0 to 1) while loading."""


class Capacity(NamedTuple):
    """What an executor found when it had loaded its model."""

    vocab_size: int
    max_model_len: int
    block_bytes: int
    """Bytes one cache block takes, over all layers."""
    free_bytes: int
    """Memory left for the cache on the tightest device."""
    machine: str = ""
    """What is computed on, and what that allows, for people."""


class StepFuture(Protocol):
    """The result of a step, sooner or later: a `concurrent.futures.Future` of one, or less."""

    def result(self, timeout: float | None = None) -> StepResult:
        """Wait for it, so many seconds at most.

        Raises:
            BaseException: what the step raised; CancelledError if the executor was closed before.
            TimeoutError: it takes longer.
        """


class Executor(Protocol):
    """Computes step plans, strictly in order. Calls may come before earlier results are there."""

    def load(self, progress: ProgressCallback) -> Capacity:
        """Load weights and report what is left for the cache."""

    def allocate(self, blocks: int) -> None:
        """Allocate the cache: `blocks` blocks."""

    def execute(self, plan: StepPlan) -> StepFuture: ...

    def watch(self, tell: Callable[[CharoniaError], None]) -> None:
        """Let `tell` know, from any thread, when it is lost between steps, at once if it is already; what computes in
        this process never is."""

    def close(self) -> None:
        """Stop and free everything; pending futures are cancelled."""
