"""Computes in this process, on the caller's thread and those that help it."""

from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError

import msgspec
import torch

from ...core.errors import CharoniaError
from ...scheduler.plan import StepPlan, StepResult
from ..checkpoint.build_context import Shard
from ..checkpoint.partition import PipelineStage
from ..config import EngineConfig
from .device import assign_device
from .executor import Capacity, ProgressCallback
from .loaded_rank import LoadedRank, load_rank


class InlineExecutor:
    """One rank in this process, for one thread of it.

    What can be computed without the caller begins when it is executed; the caller helps, and does the rest, when it
    asks for a result. What a step raises is raised by its future.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._engine: LoadedRank | None = None
        self._due: deque[_InlineFuture] = deque()
        self._threads_before: int | None = None

    def load(self, progress: ProgressCallback) -> Capacity:
        """Load the weights.

        Raises:
            CheckpointError: the checkpoint is broken or not supported.
            InvalidArgument: the configuration does not fit it or the machine.
        """
        self._threads_before = torch.get_num_threads()
        torch.set_num_threads(self._config.threads_each())
        config = msgspec.structs.replace(self._config, device=assign_device(self._config))
        seat = Shard(stage=PipelineStage(layer_counts=config.parallel.layers))
        self._engine = load_rank(config, seat, lambda fraction: progress("weights", fraction))
        return self._engine.capacity()

    def allocate(self, blocks: int) -> None:
        self.rank.runner.allocate(blocks)

    def execute(self, plan: StepPlan) -> "_InlineFuture":
        self.rank.runner.begin_step(plan)
        due = _InlineFuture(self._land)
        self._due.append(due)
        return due

    def watch(self, tell: Callable[[CharoniaError], None]) -> None:
        """It cannot be lost by itself."""

    def close(self) -> None:
        for due in self._due:
            due.error = CancelledError()
        self._due.clear()
        if self._engine is not None:
            self._engine.runner.close()
            self._engine = None
        if self._threads_before is not None:  # a setting of the caller's thread, also where loading failed
            torch.set_num_threads(self._threads_before)
            self._threads_before = None

    def _land(self) -> None:
        """The oldest step's result."""
        due = self._due.popleft()
        try:
            due.found = self.rank.runner.finish_step()
        except Exception as error:
            due.error = error

    @property
    def rank(self) -> LoadedRank:
        if self._engine is None:
            raise RuntimeError("the executor is not loaded")
        return self._engine


class _InlineFuture:
    """A step's result, computed at the latest when somebody wants it."""

    def __init__(self, land: Callable[[], None]) -> None:
        self._land = land
        self.found: StepResult | None = None
        self.error: BaseException | None = None

    def result(self, timeout: float | None = None) -> StepResult:
        """See `StepFuture.result`; whoever waits computes, however long it takes."""
        while self.error is None and self.found is None:
            self._land()
        if self.error is not None:
            raise self.error
        assert self.found is not None
        return self.found
