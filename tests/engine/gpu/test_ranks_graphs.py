"""Recorded steps of models that are split, by ranks that are threads: they replay what they all have, whatever one of
them could not capture, and say what transformers does."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

import pytest
import torch

from charonia.core.eager_reason import EagerReason
from charonia.core.errors import Unavailable
from charonia.engine.attention import selector
from charonia.engine.checkpoint.build_context import Shard
from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.gpu.graphs import Launches, StaticStep, StepGraphs
from charonia.engine.worker import rank_memory
from charonia.engine.worker.device_step_computer import DeviceStepComputer
from charonia.engine.worker.executor import Capacity, ProgressCallback
from charonia.engine.worker.loaded_rank import LoadedRank
from charonia.engine.worker.rank_group import PeerLost, RankGroup
from charonia.engine.worker.rank_memory import measure_step_bytes
from charonia.engine.worker.stage_link import StageLink
from charonia.engine.worker.step_recording import record_steps
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.plan import MaskSource, StepPlan, StepResult
from tests.engine.threads import Layout, ThreadedExecutor
from tests.nccl_stand_in import StandInNccl
from tests.recording import DeviceAttention, compute_on_queue

from .test_graphs import BLOCK, BLOCKS, NEW, Setting, expected, prompts, run, transformers_tokens


class Rank:
    """What is recorded of one rank, and its clock. What it exchanges while it is captured is `nccl`'s, if it does.
    `failing`: the numbers of captures that fail."""

    def __init__(self, nccl: StandInNccl | None) -> None:
        self.nccl = nccl
        self.captures = self.replays = 0
        self.failing: tuple[int, ...] = ()
        self.now = 0.0

    def record(self, launches: Launches) -> Launches:
        self.captures += 1
        if self.captures in self.failing:
            raise RuntimeError("operation not permitted when stream is capturing")
        compute = launches
        if self.nccl is not None:
            with self.nccl.capture():
                launches()
            compute = self.nccl.graph(launches).replay

        def replay() -> None:
            self.replays += 1
            compute()

        return replay

    def clock(self) -> float:
        return self.now


class RecordingExecutor(ThreadedExecutor):
    """Ranks whose steps are computed as on GPUs; `pace`: seconds from one plan to the next."""

    pace = 1.0

    def __init__(self, config: EngineConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        self.by_engine: dict[int, Rank] = {}
        self.nccl: dict[int, StandInNccl] = {}
        """By the group of a rank."""

    def load(self, progress: ProgressCallback) -> Capacity:
        capacity = super().load(progress)
        for engine in self.engines:
            rank = self.by_engine[id(engine)] = Rank(self.nccl.get(id(engine.context.shard.group)))
            engine.rows._lines = self._config.scheduler.max_num_seqs  # as on a GPU, where graphs read them
            engine.rows.clear()
            computer = compute_on_queue(engine)
            record_steps(self._config, engine.context, computer, None, rank.record, rank.clock)
        return capacity

    def _assemble(self, seat: Shard) -> LoadedRank:
        group = seat.group
        if group.size > 1:
            nccl = StandInNccl(group)
            group = RankGroup(nccl)
            self.nccl[id(group)] = nccl
        link = seat.link and StageLink(seat.link)
        return super()._assemble(seat._replace(group=group, link=link))

    def _step(self, engine: LoadedRank, plan: StepPlan, told: list[StepResult], masks: MaskSource | None) -> StepResult:
        self.by_engine[id(engine)].now = self.pace * plan.step
        return super()._step(engine, plan, told, masks)

    @property
    def graphs(self) -> list[StepGraphs]:
        computers = [engine.runner.computer for engine in self.engines]
        return [each.graphs for each in computers if isinstance(each, DeviceStepComputer) and each.graphs is not None]

    def measure(self) -> list[int | Exception]:
        """As ranks do together to learn what memory their steps take."""
        return self._on_all([partial(self._measure, engine) for engine in self.engines])

    def _measure(self, engine: LoadedRank) -> int | Exception:
        runner = engine.runner
        assert isinstance(runner.computer, DeviceStepComputer)
        try:
            return measure_step_bytes(self._config, engine.context, engine.shape, runner, runner.computer)
        except Exception as error:
            return error

    def capture_usual(self) -> None:
        while min(self._on_all([engine.runner.capture_next_usual for engine in self.engines])) < 1.0:
            pass


class SplitSetting(Setting):
    """The tiny model, split."""

    def __init__(self, checkpoint: Path, layout: Layout) -> None:
        self.accepted = self.preemptions = self.snapshots = 0
        self.new, self.draft_states, self.adapters = NEW, None, [""]
        scheduler = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=24)
        cache = CacheConfig(block_size=BLOCK)
        self.config = EngineConfig(
            model=str(checkpoint), device="cpu", attention="device", cache=cache, scheduler=scheduler
        )
        self.ranks = RecordingExecutor(self.config, layout)
        self.executor = self.ranks  # type: ignore[assignment]
        self.ranks.load(lambda phase, fraction: None)
        self.ranks.allocate(BLOCKS)
        self.prompts, self.right = prompts(), transformers_tokens(checkpoint)


@contextmanager
def split(checkpoint: Path, layout: Layout) -> Iterator[SplitSetting]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(selector.BACKENDS, "device", DeviceAttention)
        setting = SplitSetting(checkpoint, layout)
    yield setting
    setting.ranks.close()


LAYOUTS = (Layout(2), Layout(1, 2), pytest.param(Layout(2, 2), marks=pytest.mark.proof))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: f"{layout.tensor}x{layout.stages}")
def test_replayed_steps_of_ranks_are_transformers(checkpoint: Callable[..., Path], layout: Layout) -> None:
    """Those with parts of prompts, too, some launched because their graphs come later."""
    with split(checkpoint("llama"), layout) as setting:
        setting.ranks.pace = 0.4
        found = run(setting, 0, {}, requests=8)
        assert found == expected(setting, found)
        recorded = [*setting.ranks.by_engine.values()]
        assert all(rank.replays > 5 for rank in recorded)
        assert all(any(key.prompts for key in graphs._replays) for graphs in setting.ranks.graphs)
        assert all(graphs.eager_steps[EagerReason.NOT_CAPTURED] for graphs in setting.ranks.graphs)
        assert len({tuple(graphs._replays) for graphs in setting.ranks.graphs}) == 1
        assert len({rank.captures for rank in recorded}) == 1


@pytest.mark.parametrize("computes", [True, False])
def test_what_one_rank_cannot_capture_no_rank_replays(
    checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture, computes: bool
) -> None:
    """Nor forgets: it is tried again, by all at once, after a wait. Whether the rank fails when it captures the step or
    before, when it computes it for the first time."""
    with split(checkpoint("llama"), Layout(2)) as setting:
        first, second = setting.ranks.by_engine.values()
        graphs = setting.ranks.graphs[1]
        compute, tries = graphs._compute, count(1)

        def fail(step: StaticStep) -> Sequence[torch.Tensor]:
            if next(tries) in (1, 2):
                raise RuntimeError("out of memory")
            return compute(step)

        if computes:
            second.failing = (1, 3)
        else:
            graphs._compute = fail
        found = run(setting, 0, {}, requests=8)
        assert found == expected(setting, found)
        assert [graphs.failed_captures for graphs in setting.ranks.graphs] == [2, 2]
        assert first.captures == second.captures > 2
        assert first.replays == second.replays > 5
        keys = [[*graphs._replays] for graphs in setting.ranks.graphs]
        assert keys[0] == keys[1]
        counts = [graphs.eager_steps for graphs in setting.ranks.graphs]
        assert counts[0] == counts[1]
        causes = Counter(message.rpartition(": ")[2] for message in caplog.messages if "captured" in message)
        own = "operation not permitted when stream is capturing" if computes else "out of memory"
        assert causes == {own: 2, "another rank could not capture it": 2}


@pytest.fixture
def peaks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is measured takes one byte."""

    def peak(device: torch.device, compute: Callable[[], object]) -> int:
        compute()
        return 1

    monkeypatch.setattr(rank_memory, "peak_bytes", peak)


@pytest.mark.usefixtures("peaks")
@pytest.mark.parametrize("layout", LAYOUTS[:2], ids=lambda layout: f"{layout.tensor}x{layout.stages}")
@pytest.mark.parametrize("lacks_memory", [True, False])
def test_a_rank_that_cannot_compute_its_largest_steps_leaves_no_other_waiting(
    checkpoint: Callable[..., Path], layout: Layout, lacks_memory: bool
) -> None:
    """It says why, and the ranks of its stage that another one failed. Those of other stages have exchanged nothing
    with it yet."""
    with split(checkpoint("llama"), layout) as setting:
        graphs = setting.ranks.graphs[1]
        compute = graphs._compute

        def fail(step: StaticStep) -> Sequence[torch.Tensor]:
            compute(step)
            if lacks_memory:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nMore.")
            raise RuntimeError("a kernel did not compile")

        graphs._compute = fail
        other, own = setting.ranks.measure()
        if lacks_memory:
            assert isinstance(own, Unavailable)
            assert str(own).startswith("the largest steps cannot be computed beside the weights: CUDA out of memory.")
            assert str(own).endswith("Lower max_num_batched_tokens (24) or max_num_seqs (4), or free the GPU")
        else:
            assert isinstance(own, RuntimeError)
        assert isinstance(other, PeerLost if layout.tensor > 1 else int)


def test_graphs_are_gone_before_what_their_exchanges_use(checkpoint: Callable[..., Path]) -> None:
    """NCCL waits for them when a rank leaves."""
    with split(checkpoint("llama"), Layout(2)) as setting:
        run(setting, 0, {}, requests=4)
        assert all(nccl.graphs for nccl in setting.ranks.nccl.values())
        setting.ranks.close()
        for nccl in setting.ranks.nccl.values():
            nccl.destroy()


@pytest.mark.usefixtures("peaks")
def test_a_start_captures_the_usual_steps_of_all_ranks(checkpoint: Callable[..., Path]) -> None:
    """When they have computed the largest ones together, to learn what memory they have left."""
    with split(checkpoint("llama"), Layout(2)) as setting:
        measured = setting.ranks.measure()
        assert measured == [2 + graphs.bytes for graphs in setting.ranks.graphs]
        assert len({*measured}) == 1
        setting.ranks.allocate(BLOCKS)
        setting.ranks.capture_usual()
        usual = setting.ranks.graphs[0].buckets.usual_keys
        assert all([*graphs._replays] == usual for graphs in setting.ranks.graphs)
        found = run(setting, 0, {}, requests=4)
        assert found == expected(setting, found)
        assert not any(graphs.eager_steps for graphs in setting.ranks.graphs)
