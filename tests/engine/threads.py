"""Ranks that are threads of this process: the models' side of splitting, without what joins processes.

Groups meet at barriers, stages pass hidden states through queues, and an executor tells stages that choose no tokens
what was chosen with the next plan, as rank processes are told.
"""

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from queue import SimpleQueue
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from charonia.core.eager_reason import EagerReason
from charonia.engine.checkpoint.build_context import Shard
from charonia.engine.checkpoint.partition import PipelineStage
from charonia.engine.config import EngineConfig
from charonia.engine.parallel.rank_messages import SampledBatch
from charonia.engine.worker.executor import Capacity, ProgressCallback
from charonia.engine.worker.loaded_rank import LoadedRank, load_rank
from charonia.scheduler.plan import MaskSource, StepPlan, StepResult

PATIENCE = 10
T = TypeVar("T")


class Meeting:
    """What the ranks of one group share."""

    def __init__(self, size: int) -> None:
        self.parts = [torch.empty(0)] * size
        self.barrier = threading.Barrier(size)

    def groups(self) -> list["Threads"]:
        return [Threads(rank, self) for rank in range(len(self.parts))]


class Threads:
    """A group whose ranks are threads of this process."""

    def __init__(self, rank: int, meeting: Meeting) -> None:
        self.rank, self.size = rank, len(meeting.parts)
        self._meeting = meeting

    def all_reduce(self, partial: Tensor) -> Tensor:
        return torch.stack(self._exchange(partial)).sum(0)

    def all_gather(self, part: Tensor, total: int) -> Tensor:
        whole = torch.cat(self._exchange(part), -1)
        assert whole.shape[-1] == total
        return whole

    def _exchange(self, mine: Tensor) -> list[Tensor]:
        parts, barrier = self._meeting.parts, self._meeting.barrier
        parts[self.rank] = mine
        barrier.wait(PATIENCE)
        everyone = list(parts)
        barrier.wait(PATIENCE)
        return everyone


class Queues(NamedTuple):
    """A pipe that lends what is sent: were it written to again, the next stage would see it."""

    before: SimpleQueue[Tensor]
    after: SimpleQueue[Tensor]

    def receive(self, into: Tensor) -> None:
        into.copy_(self.before.get(timeout=PATIENCE))

    def send(self, x: Tensor) -> None:
        assert x.is_contiguous()
        self.after.put(x)


class Layout(NamedTuple):
    """`tensor` ranks in each of `stages` stages, which have `split` layers."""

    tensor: int = 1
    stages: int = 1
    split: tuple[int, ...] = ()

    def seats(self) -> list[Shard]:
        """Of all ranks, stage by stage."""
        pipes = self._pipes()
        return [
            Shard(group, PipelineStage(index, self.stages, self.split), pipes[index][group.rank])
            for index in range(self.stages)
            for group in Meeting(self.tensor).groups()
        ]

    def _pipes(self) -> list[list[Queues | None]]:
        if self.stages == 1:
            return [[None] * self.tensor]
        joints = [[SimpleQueue[Tensor]() for _ in range(self.tensor)] for _ in range(self.stages + 1)]
        return [[Queues(*ends) for ends in zip(*pair, strict=True)] for pair in pairwise(joints)]


class ThreadedExecutor:
    """An executor over threads, one for each rank."""

    eager_steps: Mapping[EagerReason, int] = {}
    failed_captures = 0

    def capture_usual_steps(self, progress: ProgressCallback) -> None: ...

    def use_idle_time(self) -> None: ...

    def __init__(self, config: EngineConfig, layout: Layout) -> None:
        self._config, self._seats = config, layout.seats()
        self._workers = [ThreadPoolExecutor(1, f"rank {rank}") for rank in range(len(self._seats))]
        self._chosen: SimpleQueue[StepResult] = SimpleQueue()
        self.engines: list[LoadedRank] = []

    def load(self, progress: ProgressCallback) -> Capacity:
        self.engines = self._on_all([lambda seat=seat: self._assemble(seat) for seat in self._seats])
        capacities = [engine.capacity(len(self.engines)) for engine in self.engines]
        return min(capacities, key=lambda capacity: capacity.free_bytes)

    def _assemble(self, seat: Shard) -> LoadedRank:
        torch.set_num_threads(1)
        return load_rank(self._config, seat)

    def allocate(self, blocks: int, host_blocks: int = 0, snapshots: int = 0, host_snapshots: int = 0) -> None:
        self._chosen = SimpleQueue()  # rows of before mean nothing
        sizes = blocks, host_blocks, snapshots, host_snapshots
        self._on_all([lambda engine=engine: engine.runner.allocate(*sizes) for engine in self.engines])

    def _on_all(self, calls: list[Callable[[], T]]) -> list[T]:
        futures = [worker.submit(call) for worker, call in zip(self._workers, calls, strict=True)]
        return [future.result(PATIENCE) for future in futures]

    def execute(self, plan: StepPlan, masks: MaskSource | None = None) -> Future[StepResult]:
        told = list(self._told())
        made = None if masks is None else masks()
        masks = None if made is None else partial(np.asarray, made)
        futures = [
            worker.submit(self._step, engine, plan, told, masks)
            for worker, engine in zip(self._workers, self.engines, strict=True)
        ]
        done: Future[StepResult] = Future()
        threading.Thread(target=self._land, args=(futures, done), daemon=True).start()
        return done

    def _told(self) -> Iterator[StepResult]:
        """What was chosen since the last plan."""
        while not self._chosen.empty():
            yield self._chosen.get()

    def _step(self, engine: LoadedRank, plan: StepPlan, told: list[StepResult], masks: MaskSource | None) -> StepResult:
        if not engine.context.shard.stage.last:
            for result in told:
                engine.runner.store_remote_tokens(*SampledBatch.from_results([result]))
        return engine.runner.run_step(plan, masks)

    def _land(self, futures: list[Future[StepResult]], done: Future[StepResult]) -> None:
        """Every rank of the last stage must have come to the same, and the others to nothing."""
        try:
            results = [future.result(PATIENCE) for future in futures]
            last = [result for result, seat in zip(results, self._seats, strict=True) if seat.stage.last]
            for result in last:
                for column, first in zip(result[1:5], last[0][1:5], strict=True):
                    assert np.array_equal(column, first), "ranks of a stage chose differently"
            assert all(not len(result.rows) for result in results[: -len(last)])
        except BaseException as broken:
            done.set_exception(broken)
            return
        self._chosen.put(last[0])
        done.set_result(last[0])

    def load_adapter(self, path: str) -> set[str]:
        """The digests that ranks found."""
        loads = [engine.loaded_adapters.load(path) for engine in self.engines]
        return {load.result(PATIENCE).digest for load in loads}

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for worker in self._workers:
            worker.shutdown(cancel_futures=True)


@contextmanager
def ranks(config: EngineConfig, layout: Layout) -> Iterator[ThreadedExecutor]:
    """A loaded executor."""
    executor = ThreadedExecutor(config, layout)
    try:
        executor.load(lambda phase, fraction: None)
        yield executor
    finally:
        executor.close()
