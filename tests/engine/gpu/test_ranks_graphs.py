"""Recorded steps of models that are split, by ranks that are threads: they replay what they all have, whatever one of
them could not capture, and say what transformers does."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest
import torch

from charonia.core.eager_reason import EagerReason
from charonia.engine.attention import selector
from charonia.engine.checkpoint.build_context import Shard
from charonia.engine.config import CacheConfig, EngineConfig
from charonia.engine.gpu.graphs import Launches, StaticStep, StepGraphs
from charonia.engine.worker.device_step_computer import DeviceStepComputer
from charonia.engine.worker.executor import Capacity, ProgressCallback
from charonia.engine.worker.loaded_rank import LoadedRank
from charonia.engine.worker.rank_group import RankGroup
from charonia.engine.worker.stage_link import StageLink
from charonia.engine.worker.step_recording import record_steps
from charonia.scheduler.config import SchedulerConfig
from charonia.scheduler.plan import MaskSource, StepPlan, StepResult
from tests.engine.threads import Layout, ThreadedExecutor
from tests.recording import DeviceAttention, compute_on_queue

from .test_graphs import BLOCK, BLOCKS, NEW, Setting, expected, prompts, run, transformers_tokens


class Rank:
    """What is recorded of one rank, and its clock. As in CUDA nothing is computed while it is captured. `failing`: the
    numbers of captures that fail."""

    def __init__(self) -> None:
        self.captures = self.replays = 0
        self.failing: tuple[int, ...] = ()
        self.now = 0.0

    def record(self, launches: Launches) -> Launches:
        self.captures += 1
        if self.captures in self.failing:
            raise RuntimeError("operation not permitted when stream is capturing")

        def replay() -> None:
            self.replays += 1
            launches()

        return replay

    def clock(self) -> float:
        return self.now


class RecordingExecutor(ThreadedExecutor):
    """Ranks whose steps are computed as on GPUs; `pace`: seconds from one plan to the next."""

    pace = 1.0

    def __init__(self, config: EngineConfig, layout: Layout) -> None:
        super().__init__(config, layout)
        self.by_engine: dict[int, Rank] = {}

    def load(self, progress: ProgressCallback) -> Capacity:
        capacity = super().load(progress)
        for engine in self.engines:
            rank = self.by_engine[id(engine)] = Rank()
            computer = compute_on_queue(engine)
            record_steps(self._config, engine.context, computer, None, rank.record, rank.clock)
        return capacity

    def _assemble(self, seat: Shard) -> LoadedRank:
        group = RankGroup(seat.group) if seat.group.size > 1 else seat.group
        link = seat.link and StageLink(seat.link)
        return super()._assemble(seat._replace(group=group, link=link))

    def _step(self, engine: LoadedRank, plan: StepPlan, told: list[StepResult], masks: MaskSource | None) -> StepResult:
        self.by_engine[id(engine)].now = self.pace * plan.step
        return super()._step(engine, plan, told, masks)

    @property
    def graphs(self) -> list[StepGraphs]:
        computers = [engine.runner.computer for engine in self.engines]
        return [each.graphs for each in computers if isinstance(each, DeviceStepComputer) and each.graphs is not None]

    def compute_largest(self) -> None:
        """As ranks do together to learn what memory they have left."""
        self._on_all([graphs.compute_largest for graphs in self.graphs])

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


def test_a_start_captures_the_usual_steps_of_all_ranks(checkpoint: Callable[..., Path]) -> None:
    """When they have computed the largest ones together, to learn what memory they have left."""
    with split(checkpoint("llama"), Layout(2)) as setting:
        run(setting, 0, {}, requests=4)  # a CPU's tables of rows begin empty, and drop graphs as they grow
        for graphs in setting.ranks.graphs:
            graphs.forget()
            graphs.eager_steps.clear()
        setting.ranks.compute_largest()
        assert len({graphs.bytes for graphs in setting.ranks.graphs}) == 1
        setting.ranks.capture_usual()
        usual = setting.ranks.graphs[0].buckets.usual_keys
        assert all([*graphs._replays] == usual for graphs in setting.ranks.graphs)
        found = run(setting, 0, {}, requests=4)
        assert found == expected(setting, found)
        assert not any(graphs.eager_steps for graphs in setting.ranks.graphs)
