"""Computes in this process, on one thread of its own."""

from collections.abc import Callable
from queue import SimpleQueue

import msgspec
import torch

from ...core.errors import CharoniaError
from ...scheduler.plan import StepPlan
from ..assembly import Engine, assemble
from ..config import EngineConfig
from ..device import own_device
from ..place import Seat
from ..stage import Stage
from .base import Capacity, Progress, StepFuture
from .worker import Worker


class InlineExecutor:
    """One rank in this process.

    Everything that touches torch runs on one worker thread, in order: torch's thread pool and its settings belong
    to the thread that uses them. What a step raises is raised by its future.
    """

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._worker = Worker("compute")
        self._engine: Engine | None = None

    def load(self, progress: Progress) -> Capacity:
        """Load the weights; `progress` is called on the caller's thread.

        Raises:
            CheckpointError: the checkpoint is broken or not supported.
            InvalidArgument: the configuration does not fit it or the machine.
        """
        reports: SimpleQueue[tuple[str, float] | None] = SimpleQueue()
        loading = self._worker.submit(self._load, reports)
        while report := reports.get():
            progress(*report)
        return loading.result()

    def allocate(self, blocks: int) -> None:
        self._worker.submit(self._loaded.runner.allocate, blocks).result()

    def execute(self, plan: StepPlan) -> StepFuture:
        return self._worker.submit(self._loaded.runner.step, plan)

    def watch(self, tell: Callable[[CharoniaError], None]) -> None:
        """It cannot be lost by itself."""

    def close(self) -> None:
        self._worker.close()
        self._engine = None

    @property
    def _loaded(self) -> Engine:
        if self._engine is None:
            raise RuntimeError("the executor is not loaded")
        return self._engine

    def _load(self, reports: SimpleQueue[tuple[str, float] | None]) -> Capacity:
        """None is the last report, whatever happens."""
        try:
            torch.set_num_threads(self._config.threads_each())
            config = msgspec.structs.replace(self._config, device=own_device(self._config))
            seat = Seat(stage=Stage(split=config.parallel.layers))
            self._engine = assemble(config, seat, lambda fraction: reports.put(("weights", fraction)))
            return self._engine.capacity()
        finally:
            reports.put(None)
