"""Computes in rank processes: a plan goes out to all of them, its result comes back from one.

Knows where they run no better than the `LaunchedRanks` that started them, and of torch nothing.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Container
from concurrent.futures import Future
from contextlib import suppress
from time import monotonic
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from ...core.errors import CharoniaError, Unavailable
from ...scheduler.plan import StepPlan, StepResult
from ..config import EngineConfig
from ..worker.executor import Capacity, ProgressCallback
from .broadcast_ring import BroadcastRing
from .layout import RankLayout
from .local_ranks import LaunchedRanks, LocalRanks
from .pending_steps import PendingSteps
from .plan_codec import PlanEncoder, SampledBatch, StepBroadcast
from .rank_messages import (
    PLAN_PREFIX,
    AllocateCache,
    CacheAllocated,
    EncodedResult,
    JoinRanks,
    LeaveRanks,
    RankCommand,
    RankJoined,
    RankLoaded,
    RankReport,
    RankStarted,
)
from .rank_messages import WeightsProgress as WeightsRead
from .rank_monitor import RankMonitor

R = TypeVar("R", RankStarted, RankJoined, RankLoaded, CacheAllocated)

StartRanks: TypeAlias = Callable[[EngineConfig, RankLayout], LaunchedRanks]
"""Starts the ranks of an engine."""

JOIN_SECONDS = 300.0
"""How long ranks may take to start and to meet: torch may come from a cold disk."""

_LEAVE_SECONDS = 3.0


class _RunningRanks(NamedTuple):
    """What there is while ranks run."""

    crew: LaunchedRanks
    board: BroadcastRing
    watch: RankMonitor


class RanksExecutor:
    """A model on `config.parallel.world` ranks, which `muster` starts.

    When one is lost the others are ended at once, and everything pending fails with an error that names it.
    """

    def __init__(
        self, config: EngineConfig, muster: StartRanks = LocalRanks, join_seconds: float = JOIN_SECONDS
    ) -> None:
        self._config, self._muster, self._join_seconds = config, muster, join_seconds
        self._layout = RankLayout(config.parallel.tensor, config.parallel.pipeline)
        self._encode = msgspec.msgpack.Encoder().encode
        self._writer = PlanEncoder()
        self._pending = PendingSteps()
        self._landed: deque[StepResult] = deque()
        self._staff: _RunningRanks | None = None
        # By what is said and who says it: a quick rank may say the next thing before a slow one says this.
        self._heard: defaultdict[type[RankReport], dict[int, Any]] = defaultdict(dict)

    def load(self, progress: ProgressCallback) -> Capacity:
        """Start the ranks and let each load its share; `progress` is called on the caller's thread.

        Raises:
            Unavailable: one does not join, or died; the message names it.
            CharoniaError: what one of them raised.
        """
        progress("ranks", 0.0)
        self._begin()
        deadline = monotonic() + self._join_seconds
        host, port = msgspec.structs.astuple(self._everyone(RankStarted, deadline)[0])
        self._tell(JoinRanks(host, port))
        self._everyone(RankJoined, deadline)
        progress("ranks", 1.0)
        loaded = self._everyone(RankLoaded, progress=progress)
        progress("weights", 1.0)
        return _smallest_capacity([loaded[rank].to_capacity() for rank in range(self._layout.world)], self._layout)

    def allocate(self, blocks: int) -> None:
        """Allocate every rank's part of the cache, and begin anew."""
        self._landed.clear()
        self._tell(AllocateCache(blocks))
        self._everyone(CacheAllocated)

    def execute(self, plan: StepPlan) -> Future[StepResult]:
        board = self._started.board
        step = self._pending.add_step()
        if not step.done():
            with suppress(OSError):  # a rank is gone: whoever watches them fails the step
                board.publish(PLAN_PREFIX + self._writer.encode(StepBroadcast(plan, self._take_landed())))
        return step

    def watch(self, tell: Callable[[CharoniaError], None]) -> None:
        """Call `tell`, from any thread, when a rank is lost; at once if one is already."""
        self._pending.on_loss(tell)

    def close(self) -> None:
        if self._staff is None:
            return
        crew, board, watch = self._staff
        watch.expect_exits()
        with suppress(OSError):
            board.publish_inline(self._encode(LeaveRanks()))
        crew.wait_for_exit(0.0 if self._pending.loss else _LEAVE_SECONDS)
        watch.join()
        crew.close()
        self._pending.cancel_all()
        self._staff = None

    @property
    def _started(self) -> _RunningRanks:
        if self._staff is None:
            raise RuntimeError("the executor is not loaded")
        return self._staff

    def _begin(self) -> None:
        crew = self._muster(self._config, self._layout)
        watch = RankMonitor(crew, self._layout, self._land, self._pending.fail_all)
        self._staff = _RunningRanks(crew, BroadcastRing(crew.connections, crew.memory), watch)

    def _tell(self, command: RankCommand) -> None:
        with suppress(OSError):  # as above
            self._started.board.publish_inline(self._encode(command))

    def _everyone(
        self, kind: type[R], deadline: float | None = None, progress: ProgressCallback = lambda phase, fraction: None
    ) -> dict[int, R]:
        """What every rank says of this kind. On the way there, tell `progress` of weights read."""
        told = 0.0
        while len(self._heard[kind]) < self._layout.world:
            said = self._started.watch.next_report(deadline)
            if said is None:
                raise self._absent(self._heard[kind])
            self._heard[type(said.report)][said.rank] = said.report
            read = sum(report.fraction for report in self._heard[WeightsRead].values()) / self._layout.world
            if told < read < 1.0:
                told = read
                progress("weights", told)
        return self._heard.pop(kind)

    def _absent(self, heard: Container[int]) -> Unavailable:
        absent = [self._layout.rank_name(rank) for rank in range(self._layout.world) if rank not in heard]
        return Unavailable(f"{', '.join(absent)} did not join within {self._join_seconds:g} s")

    # Results, on a thread of their own

    def _land(self, result: EncodedResult) -> None:
        landed = result.to_result()
        self._started.board.release_oldest()
        if self._layout.pipeline > 1:
            self._landed.append(landed)
        self._pending.resolve_oldest(landed)

    def _take_landed(self) -> SampledBatch | None:
        """What was sampled since the last plan, for the stages that cannot know: a sequence's next plan comes after its
        last result."""
        landed: list[StepResult] = []
        while self._landed:  # more may come meanwhile
            landed.append(self._landed.popleft())
        return SampledBatch.from_results(landed) if any(len(result.rows) for result in landed) else None


def _smallest_capacity(capacities: list[Capacity], layout: RankLayout) -> Capacity:
    """What all ranks can hold is what the one can that holds the fewest blocks."""
    least = min(capacities, key=lambda each: each.free_bytes / each.block_bytes)
    machine = capacities[0].machine
    return least._replace(machine=f"{layout}, each {machine}" if machine else str(layout))
