"""What the executor makes of what ranks say, and of those that say nothing: the ranks here are threads' words."""

import json
import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Lock, Thread
from types import ModuleType

import msgspec
import numpy as np
import pytest

from charonia.core.errors import CharoniaError, ErrorCode, Internal, InvalidArgument, Unavailable
from charonia.engine.config import EngineConfig, ParallelConfig
from charonia.engine.core.executors import build_executor
from charonia.engine.parallel.broadcast_ring import RingReader
from charonia.engine.parallel.layout import RankLayout
from charonia.engine.parallel.plan_codec import PlanDecoder
from charonia.engine.parallel.rank_messages import (
    PLAN_PREFIX,
    AllocateCache,
    CacheAllocated,
    EncodedResult,
    JoinRanks,
    LeaveRanks,
    RankCommand,
    RankFailed,
    RankJoined,
    RankLoaded,
    RankReport,
    RankStarted,
    WeightsProgress,
)
from charonia.engine.parallel.ranks_executor import RanksExecutor
from charonia.engine.worker.executor import Capacity
from charonia.processes.shared_arena import SharedArena
from charonia.scheduler.plan import StepPlan, StepResult

NONE = np.zeros(0, np.int32)
NO_PAIRS = np.zeros((0, 2), np.int32)


class Rank:
    """The other end of a line, in this process."""

    def __init__(self, line: Connection, memory: SharedArena) -> None:
        self.line, self._desk, self._reader = line, RingReader(line, memory), PlanDecoder()

    def say(self, *reports: RankReport) -> None:
        for report in reports:
            self.line.send_bytes(msgspec.msgpack.encode(report))

    def hear(self) -> RankCommand:
        return msgspec.msgpack.decode(self._desk.read(), type=RankCommand)

    def read(self) -> tuple[int, list[list[int]] | None]:
        """The next plan's step, and what landed before it."""
        message = self._desk.read()
        assert message[:1] == PLAN_PREFIX
        plan, landed = self._reader.decode(message[1:])
        return plan.step, None if landed is None else [column.tolist() for column in landed]


class Pretended:
    """A crew of whom the test says what they say."""

    def __init__(self, layout: RankLayout) -> None:
        self.memory = SharedArena()
        pairs = [multiprocessing.Pipe() for _ in range(layout.world)]
        self.connections = [ours for ours, _ in pairs]
        self.ranks = [Rank(theirs, self.memory) for _, theirs in pairs]
        self.killed = Event()
        self._breaking = Lock()

    def exit_reason(self, rank: int) -> str:
        return "fell over"

    def kill(self) -> None:
        self.killed.set()
        self.break_lines()

    def wait_for_exit(self, patience: float) -> None:
        self.break_lines()

    def close(self) -> None:
        for line in self.connections:
            line.close()
        self.memory.close()

    def fall(self, rank: int) -> None:
        with self._breaking:
            self.ranks[rank].line.close()

    def break_lines(self) -> None:
        with self._breaking:
            for rank in self.ranks:
                rank.line.close()


class Stage:
    """An executor and its pretended ranks."""

    def __init__(self, tensor: int, pipeline: int, join_seconds: float = 60.0) -> None:
        self.crew = Pretended(RankLayout(tensor, pipeline))
        config = EngineConfig(model="", parallel=ParallelConfig(tensor=tensor, pipeline=pipeline))
        self.executor = RanksExecutor(config, lambda config, layout: self.crew, join_seconds)
        self.ranks = self.crew.ranks
        self.told: list[tuple[str, float]] = []

    def load_alone(self) -> None:
        """Load with whatever the ranks have said."""
        self.executor.load(lambda phase, fraction: None)

    def load(self, *capacities: RankLoaded) -> Capacity:
        """Let all ranks do what they should, and say these at the end."""
        threads = [
            Thread(target=self._arrive, args=pair, daemon=True) for pair in zip(self.ranks, capacities, strict=True)
        ]
        for thread in threads:
            thread.start()
        capacity = self.executor.load(lambda phase, fraction: self.told.append((phase, fraction)))
        for thread in threads:
            thread.join()
        return capacity

    def _arrive(self, rank: Rank, loaded: RankLoaded) -> None:
        rank.say(RankStarted("here", 7) if rank is self.ranks[0] else RankStarted())
        assert rank.hear() == JoinRanks("here", 7)
        rank.say(RankJoined(), WeightsProgress(0.5), WeightsProgress(1.0), loaded)


PLAIN = RankLoaded(Capacity(384, 256, 1000, 10_000))


@pytest.fixture
def staged() -> Iterator[Callable[..., Stage]]:
    made: list[Stage] = []

    def make(tensor: int = 2, pipeline: int = 1, **wishes: float) -> Stage:
        made.append(Stage(tensor, pipeline, **wishes))
        return made[-1]

    yield make
    for stage in made:
        stage.executor.close()


@pytest.fixture
def loaded(staged: Callable[..., Stage]) -> Stage:
    stage = staged()
    stage.load(PLAIN, PLAIN)
    return stage


def plan(step: int, *rows: int) -> StepPlan:
    column = np.array(rows, np.int32)
    ones = np.ones_like(column)
    return StepPlan(step, column, ones * 5, ones, ones == 1, ones, NO_PAIRS, (), NONE)


def result(step: int, *rows: int) -> EncodedResult:
    column = np.array(rows, np.int32)
    return EncodedResult.from_result(StepResult(step, column, column * 0 + 6, column * 0 + 1, column + 100))


def test_capacity_is_the_tightest_ranks(staged: Callable[..., Stage]) -> None:
    stage = staged(3)
    capacity = stage.load(
        *(RankLoaded(Capacity(384, 256, *sizes)) for sizes in ((100, 9000), (300, 9000), (100, 4000)))
    )
    assert capacity[:4] == (384, 256, 300, 9000)


def test_progress_is_everybodys_and_only_grows(loaded: Stage) -> None:
    phases = [phase for phase, _ in loaded.told]
    weights = [fraction for phase, fraction in loaded.told if phase == "weights"]
    assert phases[:2] == ["ranks", "ranks"]
    assert weights == sorted(set(weights))
    assert weights[-1] == 1.0


def test_who_does_not_join_is_named(staged: Callable[..., Stage]) -> None:
    stage = staged(3, join_seconds=0.2)
    stage.ranks[0].say(RankStarted("here", 7))
    stage.ranks[2].say(RankStarted())
    with pytest.raises(Unavailable, match=r"^rank 1 of 3 did not join within 0.2 s$"):
        stage.load_alone()


def test_who_joins_nobody_is_named(staged: Callable[..., Stage]) -> None:
    stage = staged(2, 2, join_seconds=0.2)
    stage.ranks[0].say(RankStarted("here", 7))
    for rank in stage.ranks[1:]:
        rank.say(RankStarted())
    for rank in stage.ranks[:3]:
        rank.say(RankJoined())
    with pytest.raises(Unavailable, match=r"^rank 3 of 4 \(stage 1, tensor 1\) did not join"):
        stage.load_alone()


def test_what_a_rank_finds_wrong_is_raised_as_it_is(staged: Callable[..., Stage]) -> None:
    stage = staged()
    stage.ranks[1].say(
        RankStarted(), RankFailed("dtype must be one of these", ErrorCode.INVALID_ARGUMENT, field="dtype")
    )
    with pytest.raises(InvalidArgument, match=r"^dtype must be one of these$") as refusal:
        stage.load_alone()
    assert refusal.value.field == "dtype"
    assert stage.crew.killed.is_set()


def test_what_breaks_in_a_rank_names_it(staged: Callable[..., Stage]) -> None:
    stage = staged()
    stage.ranks[1].say(RankStarted(), RankFailed("ValueError: oh", ErrorCode.INTERNAL))
    with pytest.raises(Internal, match=r"^rank 1 of 2: ValueError: oh$"):
        stage.load_alone()


def test_allocation_waits_for_all(loaded: Stage) -> None:
    for rank in loaded.ranks:
        rank.say(CacheAllocated())
    loaded.executor.allocate(9)
    assert [rank.hear() for rank in loaded.ranks] == [AllocateCache(9)] * 2


def test_several_steps_are_on_their_way_and_return_in_order(loaded: Stage) -> None:
    steps = [loaded.executor.execute(plan(step, 0, 1)) for step in range(3)]
    for rank in loaded.ranks:
        assert [rank.read() for _ in range(3)] == [(step, None) for step in range(3)]
    loaded.ranks[0].say(*(result(step, 0, 1) for step in range(3)))
    assert [step.result(60).step for step in steps] == [0, 1, 2]
    assert steps[2].result().tokens.tolist() == [100, 101]


def test_stages_are_told_what_the_last_one_sampled(staged: Callable[..., Stage]) -> None:
    stage = staged(1, 2)
    stage.load(PLAIN, PLAIN)
    first, second = stage.executor.execute(plan(0, 3)), stage.executor.execute(plan(1, 4))
    stage.ranks[1].say(result(0, 3), result(1, 4))
    assert {first.result(60).step, second.result(60).step} == {0, 1}
    third = stage.executor.execute(plan(2, 3, 4))
    for rank in stage.ranks:
        assert [rank.read() for _ in range(3)] == [(0, None), (1, None), (2, [[3, 4], [6, 6], [103, 104]])]
    stage.ranks[1].say(result(2))
    assert not len(third.result(60).rows)


def test_nothing_of_one_cache_is_told_to_the_next(staged: Callable[..., Stage]) -> None:
    stage = staged(1, 2)
    stage.load(PLAIN, PLAIN)
    step = stage.executor.execute(plan(0, 3))
    stage.ranks[1].say(result(0, 3))
    step.result(60)
    for rank in stage.ranks:
        rank.say(CacheAllocated())
    stage.executor.allocate(1)
    stage.executor.execute(plan(1, 3))
    assert stage.ranks[0].read() == (0, None)
    assert stage.ranks[0].hear() == AllocateCache(1)
    assert stage.ranks[0].read() == (1, None)


def lost(stage: Stage) -> tuple[list[Future[StepResult]], list[CharoniaError], Event]:
    """Two steps on their way, and who is told of a loss."""
    told: list[CharoniaError] = []
    heard = Event()

    def tell(error: CharoniaError) -> None:
        told.append(error)
        heard.set()

    stage.executor.watch(tell)
    return [stage.executor.execute(plan(step, 0)) for step in range(2)], told, heard


def test_a_lost_rank_fails_everything_and_ends_the_others(loaded: Stage) -> None:
    steps, told, heard = lost(loaded)
    loaded.crew.fall(1)
    for step in (*steps, loaded.executor.execute(plan(2, 0))):
        with pytest.raises(Unavailable, match=r"^rank 1 of 2 fell over$"):
            step.result(60)
    assert heard.wait(60)
    assert [error.message for error in told] == ["rank 1 of 2 fell over"]
    assert loaded.crew.killed.is_set()


def test_who_watches_late_is_told_at_once(loaded: Stage) -> None:
    steps, _, heard = lost(loaded)
    loaded.crew.fall(0)
    assert heard.wait(60)
    told: list[CharoniaError] = []
    loaded.executor.watch(told.append)
    assert [error.message for error in told] == ["rank 0 of 2 fell over"]
    assert all(step.exception(60) for step in steps)


def test_the_rank_that_was_lost_is_named_and_not_the_one_that_missed_it(loaded: Stage) -> None:
    steps, _, _ = lost(loaded)
    loaded.ranks[0].say(RankFailed("lost the other ranks: connection closed", ErrorCode.UNAVAILABLE, lost_peer=True))
    loaded.crew.fall(1)
    with pytest.raises(Unavailable, match=r"^rank 1 of 2 fell over$"):
        steps[0].result(60)


def test_a_loss_that_nobody_explains_names_who_noticed(loaded: Stage) -> None:
    steps, _, _ = lost(loaded)
    loaded.ranks[0].say(RankFailed("lost the other ranks: connection closed", ErrorCode.UNAVAILABLE, lost_peer=True))
    with pytest.raises(Unavailable, match=r"^rank 0 of 2: lost the other ranks: connection closed$"):
        steps[0].result(60)


def test_closing_asks_ranks_to_leave_and_cancels_what_is_pending(loaded: Stage) -> None:
    steps, told, _ = lost(loaded)
    heard: list[RankCommand] = []

    def listen(rank: Rank) -> None:
        rank.read(), rank.read()
        heard.append(rank.hear())

    listeners = [Thread(target=listen, args=(rank,)) for rank in loaded.ranks]
    for listener in listeners:
        listener.start()
    loaded.crew.wait_for_exit = lambda patience: (
        [listener.join() for listener in listeners] and loaded.crew.break_lines()
    )
    loaded.executor.close()
    loaded.executor.close()
    assert heard == [LeaveRanks()] * 2
    assert all(step.cancelled() for step in steps)
    assert not told


def test_one_rank_is_no_place_for_several() -> None:
    for name in ("inline", "fake"):
        config = EngineConfig(model="", executor=name, parallel=ParallelConfig(tensor=2))
        with pytest.raises(InvalidArgument, match="is one rank, and 2 are wanted"):
            build_executor(config)


def test_an_executor_that_nobody_knows_is_named() -> None:
    with pytest.raises(InvalidArgument, match="'threads'; there are auto, inline, ranks, fake") as raised:
        build_executor(EngineConfig(model="", executor="threads"))
    assert raised.value.field == "executor"


def test_what_cannot_be_split_is_refused_before_a_rank_is_started(making: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], **making.LLAMA}))
    for parallel, reason in (
        (ParallelConfig(tensor=3), "4 attention heads can't be shared evenly by 3 ranks"),
        (ParallelConfig(pipeline=3), "2 layers can't be split over 3 stages"),
        (ParallelConfig(pipeline=2, layers=(2, 1)), "must give each of its 2 layers to one of 2 stages"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            build_executor(EngineConfig(model=str(tmp_path), parallel=parallel))
