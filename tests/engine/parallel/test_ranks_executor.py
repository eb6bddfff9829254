"""The executor over ranks that the tests play: their reports, their silence and their loss."""

import json
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.connection import Connection
from pathlib import Path
from threading import Event, Lock, Thread
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest

from charonia.core.adapter import Adapter
from charonia.core.eager_reason import EagerReason
from charonia.core.errors import CharoniaError, Internal, InvalidArgument, SentError, Unavailable
from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.config import EngineConfig, ParallelConfig
from charonia.engine.core import process
from charonia.engine.core.process import build_executor
from charonia.engine.parallel.rank_layout import RankLayout
from charonia.engine.parallel.rank_messages import (
    AllocateCache,
    CacheAllocated,
    CaptureGraph,
    ComputeStep,
    GraphsCaptured,
    JoinRanks,
    LeaveRanks,
    LoadRankAdapter,
    RankAdapterLoaded,
    RankAdapterRefused,
    RankCommand,
    RankFailed,
    RankJoined,
    RankLoaded,
    RankReport,
    RankStarted,
    StepComputed,
    UnloadRankAdapter,
    WeightsProgress,
    decode_command,
    encode_message,
)
from charonia.engine.parallel.ranks_executor import PendingFutures, RanksExecutor, tightest_capacity
from charonia.engine.worker.executor import Capacity
from charonia.scheduler.plan import NewSequence, StepPlan, StepResult

NONE = np.zeros(0, np.int32)
NO_PAIRS = np.zeros((0, 2), np.int32)


class PlayedRank:
    """The other end of a connection, in this process."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def report(self, *reports: RankReport) -> None:
        for report in reports:
            self.connection.send_bytes(encode_message(report))

    def receive(self) -> RankCommand:
        return decode_command(self.connection.recv_bytes())

    def receive_step(self) -> tuple[int, list[list[int]] | None]:
        """The next plan's step, and the tokens sampled before it."""
        command = self.receive()
        assert isinstance(command, ComputeStep)
        return command.plan.step, None if command.sampled is None else [column.tolist() for column in command.sampled]


class PlayedRanks:
    """`LaunchedRanks` that the test plays."""

    def __init__(self, layout: RankLayout) -> None:
        pairs = [multiprocessing.Pipe() for _ in range(layout.world)]
        self.connections = [ours for ours, _ in pairs]
        self.ranks = [PlayedRank(theirs) for _, theirs in pairs]
        self.killed = Event()
        self._breaking = Lock()

    def exit_reason(self, rank: int) -> str:
        return "fell over"

    def kill(self) -> None:
        self.killed.set()
        self.disconnect_all()

    def wait_for_exit(self, timeout: float) -> None:
        self.disconnect_all()

    def close(self) -> None:
        for connection in self.connections:
            connection.close()

    def lose(self, rank: int) -> None:
        with self._breaking:
            self.ranks[rank].connection.close()

    def disconnect_all(self) -> None:
        with self._breaking:
            for rank in self.ranks:
                rank.connection.close()


class Stage:
    """An executor and its pretended ranks."""

    def __init__(self, tensor: int, pipeline: int, join_seconds: float = 60.0) -> None:
        self.played = PlayedRanks(RankLayout(tensor, pipeline))
        config = EngineConfig(model="", parallel=ParallelConfig(tensor=tensor, pipeline=pipeline))
        self.executor = RanksExecutor(config, lambda config, layout: self.played, join_seconds)
        self.ranks = self.played.ranks
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

    def _arrive(self, rank: PlayedRank, loaded: RankLoaded) -> None:
        rank.report(RankStarted("here", 7) if rank is self.ranks[0] else RankStarted())
        assert rank.receive() == JoinRanks("here", 7)
        rank.report(RankJoined(), WeightsProgress(0.5), WeightsProgress(1.0), loaded)


LOST_PEER = SentError.of(Unavailable("lost the other ranks: connection closed"))
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


def result(step: int, *rows: int) -> StepComputed:
    column = np.array(rows, np.int32)
    return StepComputed(StepResult(step, column, column * 0 + 6, column * 0 + 1, column + 100))


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
    stage.ranks[0].report(RankStarted("here", 7))
    stage.ranks[2].report(RankStarted())
    with pytest.raises(Unavailable, match=r"^rank 1 of 3 did not join within 0.2 s$"):
        stage.load_alone()


def test_who_joins_nobody_is_named(staged: Callable[..., Stage]) -> None:
    stage = staged(2, 2, join_seconds=0.2)
    stage.ranks[0].report(RankStarted("here", 7))
    for rank in stage.ranks[1:]:
        rank.report(RankStarted())
    for rank in stage.ranks[:3]:
        rank.report(RankJoined())
    with pytest.raises(Unavailable, match=r"^rank 3 of 4 \(stage 1, tensor 1\) did not join"):
        stage.load_alone()


def test_what_a_rank_finds_wrong_is_raised_as_it_is(staged: Callable[..., Stage]) -> None:
    stage = staged()
    stage.ranks[1].report(
        RankStarted(), RankFailed(SentError.of(InvalidArgument("dtype must be one of these", field="dtype")))
    )
    with pytest.raises(InvalidArgument, match=r"^dtype must be one of these$") as refusal:
        stage.load_alone()
    assert refusal.value.field == "dtype"
    assert stage.played.killed.is_set()


def test_what_breaks_in_a_rank_names_it(staged: Callable[..., Stage]) -> None:
    stage = staged()
    stage.ranks[1].report(RankStarted(), RankFailed(SentError.of(ValueError("oh"))))
    with pytest.raises(Internal, match=r"^rank 1 of 2: ValueError: oh$"):
        stage.load_alone()


def test_allocation_waits_for_all(loaded: Stage) -> None:
    for rank in loaded.ranks:
        rank.report(CacheAllocated())
    loaded.executor.allocate(9)
    assert [rank.receive() for rank in loaded.ranks] == [AllocateCache(9)] * 2


def test_several_steps_are_on_their_way_and_return_in_order(loaded: Stage) -> None:
    steps = [loaded.executor.execute(plan(step, 0, 1)) for step in range(3)]
    for rank in loaded.ranks:
        assert [rank.receive_step() for _ in range(3)] == [(step, None) for step in range(3)]
    loaded.ranks[0].report(*(result(step, 0, 1) for step in range(3)))
    assert [step.result(60).step for step in steps] == [0, 1, 2]
    assert steps[2].result().tokens.tolist() == [100, 101]


@pytest.fixture
def on_gpus(staged: Callable[..., Stage]) -> Stage:
    stage = staged()
    stage.load(*[RankLoaded(PLAIN.capacity._replace(on_gpu=True))] * 2)
    return stage


def test_a_rank_tells_which_steps_it_launched(on_gpus: Stage) -> None:
    steps = [on_gpus.executor.execute(plan(step, 0, 1)) for step in range(2)]
    counts = {EagerReason.NOT_CAPTURED: 1}
    told = [StepComputed(result(step, 0, 1).result, counts, failed) for step, failed in ((0, 0), (1, 3))]
    on_gpus.ranks[0].report(*told)
    assert [step.result(60).step for step in steps] == [0, 1]
    assert on_gpus.executor.eager_steps == counts
    assert on_gpus.executor.failed_captures == 3


def test_plans_bring_the_clock_by_which_graphs_are_captured(on_gpus: Stage) -> None:
    """The same to all ranks, and later with each."""
    for step in range(2):
        on_gpus.executor.execute(plan(step, 0, 1))
    clocks = []
    for rank in on_gpus.ranks:
        commands = [rank.receive(), rank.receive()]
        clocks.append([command.clock for command in commands if isinstance(command, ComputeStep)])
    assert clocks[0] == clocks[1]
    assert clocks[0][0] < clocks[0][1]


def test_a_start_has_graphs_captured_until_no_rank_has_any_left(on_gpus: Stage) -> None:
    shares: list[float] = []
    start = Thread(target=on_gpus.executor.capture_usual_steps, args=(lambda phase, share: shares.append(share),))
    start.start()
    for answers in ((0.5, 0.5), (1.0, 0.75), (1.0, 1.0)):
        for rank, share in zip(on_gpus.ranks, answers, strict=True):
            command = rank.receive()
            assert isinstance(command, CaptureGraph)
            assert command.usual
            rank.report(GraphsCaptured(share))
    start.join()
    assert shares == [0.5, 0.75, 1.0]


def test_an_idle_executor_has_one_graph_captured_at_a_time(on_gpus: Stage) -> None:
    """Until none is left, or a step came in between."""
    executor, ranks = on_gpus.executor, on_gpus.ranks
    for share, asked in ((0.0, True), (1.0, True), (1.0, False)):
        executor.use_idle_time()
        executor.use_idle_time()
        for rank in ranks:
            assert rank.connection.poll(1.0 if asked else 0.0) == asked
            if asked:
                assert isinstance(rank.receive(), CaptureGraph)
                rank.report(GraphsCaptured(share))
        for capture in executor._idle_captures:
            capture.result(60)
    executor.execute(plan(0, 0, 1))
    executor.use_idle_time()
    for rank in ranks:
        assert [type(rank.receive()) for _ in range(2)] == [ComputeStep, CaptureGraph]


def test_ranks_without_gpus_capture_nothing(loaded: Stage) -> None:
    loaded.executor.capture_usual_steps(lambda phase, share: pytest.fail("there is nothing to capture"))
    loaded.executor.use_idle_time()
    assert not any(rank.connection.poll() for rank in loaded.ranks)


def test_a_plan_that_no_connection_holds_waits_for_the_ranks(loaded: Stage) -> None:
    tokens = np.arange(1 << 20, dtype=np.int32)
    new = NewSequence(0, tokens, 0, ResolvedSampling(), len(tokens))
    large = Thread(target=loaded.executor.execute, args=(plan(0, 0)._replace(new=(new,)),))
    large.start()
    for rank in loaded.ranks:
        command = rank.receive()
        assert isinstance(command, ComputeStep)
        assert np.array_equal(command.plan.new[0].tokens, tokens)
    large.join()


def test_stages_are_told_what_the_last_one_sampled(staged: Callable[..., Stage]) -> None:
    stage = staged(1, 2)
    stage.load(PLAIN, PLAIN)
    first, second = stage.executor.execute(plan(0, 3)), stage.executor.execute(plan(1, 4))
    stage.ranks[1].report(result(0, 3), result(1, 4))
    assert {first.result(60).step, second.result(60).step} == {0, 1}
    third = stage.executor.execute(plan(2, 3, 4))
    for rank in stage.ranks:
        assert [rank.receive_step() for _ in range(3)] == [(0, None), (1, None), (2, [[3, 4], [6, 6], [103, 104]])]
    stage.ranks[1].report(result(2))
    assert not len(third.result(60).rows)


def test_nothing_of_one_cache_is_told_to_the_next(staged: Callable[..., Stage]) -> None:
    stage = staged(1, 2)
    stage.load(PLAIN, PLAIN)
    step = stage.executor.execute(plan(0, 3))
    stage.ranks[1].report(result(0, 3))
    step.result(60)
    for rank in stage.ranks:
        rank.report(CacheAllocated())
    stage.executor.allocate(1)
    stage.executor.execute(plan(1, 3))
    assert stage.ranks[0].receive_step() == (0, None)
    assert stage.ranks[0].receive() == AllocateCache(1)
    assert stage.ranks[0].receive_step() == (1, None)


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
    loaded.played.lose(1)
    for step in (*steps, loaded.executor.execute(plan(2, 0))):
        with pytest.raises(Unavailable, match=r"^rank 1 of 2 fell over$"):
            step.result(60)
    assert heard.wait(60)
    assert [error.message for error in told] == ["rank 1 of 2 fell over"]
    assert loaded.played.killed.is_set()


def test_a_result_that_comes_after_a_rank_was_lost_is_nothing() -> None:
    pending = PendingFutures[int]()
    step, error = pending.add(), Unavailable("rank 1 of 2 fell over")
    pending.fail_all(error)
    pending.take_oldest().set_result(3)
    assert step.exception() is error


def test_who_watches_late_is_told_at_once(loaded: Stage) -> None:
    steps, _, heard = lost(loaded)
    loaded.played.lose(0)
    assert heard.wait(60)
    told: list[CharoniaError] = []
    loaded.executor.watch(told.append)
    assert [error.message for error in told] == ["rank 0 of 2 fell over"]
    assert all(step.exception(60) for step in steps)


def test_the_rank_that_was_lost_is_named_and_not_the_one_that_missed_it(loaded: Stage) -> None:
    steps, _, _ = lost(loaded)
    loaded.ranks[0].report(RankFailed(LOST_PEER, lost_peer=True))
    loaded.played.lose(1)
    with pytest.raises(Unavailable, match=r"^rank 1 of 2 fell over$"):
        steps[0].result(60)


def test_a_loss_that_nobody_explains_names_who_noticed(loaded: Stage) -> None:
    steps, _, _ = lost(loaded)
    loaded.ranks[0].report(RankFailed(LOST_PEER, lost_peer=True))
    with pytest.raises(Unavailable, match=r"^rank 0 of 2: lost the other ranks: connection closed$"):
        steps[0].result(60)


def test_closing_asks_ranks_to_leave_and_cancels_what_is_pending(loaded: Stage) -> None:
    steps, told, _ = lost(loaded)
    heard: list[RankCommand] = []

    def listen(rank: PlayedRank) -> None:
        rank.receive_step(), rank.receive_step()
        heard.append(rank.receive())

    listeners = [Thread(target=listen, args=(rank,)) for rank in loaded.ranks]
    for listener in listeners:
        listener.start()
    loaded.played.wait_for_exit = lambda timeout: (
        [listener.join() for listener in listeners] and loaded.played.disconnect_all()
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


def test_an_adapter_is_there_when_every_rank_has_its_share(loaded: Stage) -> None:
    loading = loaded.executor.load_adapter("somewhere")
    for rank in loaded.ranks:
        assert rank.receive() == LoadRankAdapter("somewhere")
    loaded.ranks[1].report(RankAdapterLoaded(Adapter("", "somewhere", "d", 8, 70)))
    assert not loading.done()
    loaded.ranks[0].report(RankAdapterLoaded(Adapter("", "somewhere", "d", 8, 30)))
    assert loading.result(10) == Adapter("", "somewhere", "d", 8, 100)


def test_a_share_of_an_adapter_that_another_rank_refuses_is_forgotten_before_the_next(loaded: Stage) -> None:
    loading = loaded.executor.load_adapter("somewhere")
    loaded.ranks[0].report(RankAdapterLoaded(Adapter("", "somewhere", "d", 8, 30)))
    loaded.ranks[1].report(RankAdapterRefused(SentError.of(InvalidArgument("no such layer", field="lora_path"))))
    with pytest.raises(InvalidArgument, match="no such layer"):
        loading.result(10)
    loaded.executor.load_adapter("elsewhere")
    told = [LoadRankAdapter("somewhere"), UnloadRankAdapter("d"), LoadRankAdapter("elsewhere")]
    assert [loaded.ranks[0].receive() for _ in told] == told


def test_an_adapter_that_a_lost_rank_was_loading_fails(loaded: Stage) -> None:
    loading = loaded.executor.load_adapter("somewhere")
    loaded.played.lose(1)
    with pytest.raises(Unavailable, match="rank 1 of 2 fell over"):
        loading.result(10)
    with pytest.raises(Unavailable):
        loaded.executor.load_adapter("somewhere").result(10)


def test_without_ray_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "charonia.engine.parallel.ray_ranks", raising=False)
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.setattr(process, "open_checkpoint", lambda model: SimpleNamespace(spec=None, directory=model))
    monkeypatch.setattr(process, "check_partition", lambda *arguments: None)
    with pytest.raises(InvalidArgument, match=r"needs Ray \(ray\): pip install '\.\[ray\]'") as raised:
        build_executor(EngineConfig(model="m", parallel=ParallelConfig(backend="ray")))
    assert raised.value.field == "distributed_executor_backend"


@pytest.mark.parametrize(("executor", "backend"), [("inline", "ray"), ("fake", "ray"), ("ranks", "slurm")])
def test_backends_that_do_not_fit(monkeypatch: pytest.MonkeyPatch, executor: str, backend: str) -> None:
    monkeypatch.setattr(process, "open_checkpoint", lambda model: SimpleNamespace(spec=None, directory=model))
    monkeypatch.setattr(process, "check_partition", lambda *arguments: None)
    with pytest.raises(InvalidArgument, match=backend) as raised:
        build_executor(EngineConfig(model="m", executor=executor, parallel=ParallelConfig(backend=backend)))
    assert raised.value.field == "distributed_executor_backend"


def test_of_stages_all_get_what_the_tightest_has_room_for() -> None:
    roomy = Capacity(1000, 512, block_bytes=100, free_bytes=9_000)
    narrow = Capacity(1000, 512, block_bytes=300, free_bytes=10_000)
    assert tightest_capacity([roomy, narrow]) == narrow


@pytest.mark.parametrize("order", [1, -1])
def test_of_uneven_stages_with_states_all_get_all_that_the_tightest_has_room_for(order: int) -> None:
    roomy = Capacity(1000, 512, block_bytes=300, free_bytes=9_000, state_bytes=700)
    narrow = Capacity(1000, 512, block_bytes=200, free_bytes=5_000, state_bytes=500)
    assert tightest_capacity([roomy, narrow][::order]) == narrow


@pytest.mark.parametrize("order", [1, -1])
def test_a_stage_without_states_or_without_blocks_hides_no_others(order: int) -> None:
    """It has room for the fewest blocks, and all stages keep as many states."""
    stateless = Capacity(1000, 512, block_bytes=300, free_bytes=9_000)
    mixed = Capacity(1000, 512, block_bytes=100, free_bytes=10_000, state_bytes=700)
    blockless = Capacity(1000, 512, block_bytes=0, free_bytes=11_000, state_bytes=900)
    tightest = tightest_capacity([stateless, mixed, blockless][::order])
    assert (tightest.block_bytes, tightest.free_bytes, tightest.state_bytes) == (300, 9_000, 900)
