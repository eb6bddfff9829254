"""Ranks in processes of their own: they say what one rank says, and none outlives another."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import msgspec
import pytest
from safetensors.torch import load_file, save_file

from charonia.core.errors import CharoniaError, InvalidArgument, Unavailable
from charonia.engine.config import CacheConfig, EngineConfig, ParallelConfig
from charonia.engine.parallel.local_ranks import LocalRanks
from charonia.engine.parallel.rank_layout import RankLayout
from charonia.engine.parallel.ranks_executor import RanksExecutor
from charonia.engine.worker.inline_executor import InlineExecutor

LAYERS = 4
VOCAB = 385
"""No number of ranks has equal parts of it."""
CASES = {
    "llama, tensor 2": ("llama", ParallelConfig(tensor=2)),
    "llama, pipeline 2": ("llama", ParallelConfig(pipeline=2, layers=(1, 3))),
    "llama, tensor 2 x pipeline 2": ("llama", ParallelConfig(tensor=2, pipeline=2)),
    "qwen3-moe, tensor 2": ("qwen3-moe", ParallelConfig(tensor=2)),
}


class Ranks(NamedTuple):
    """Loaded ranks, and one that is alone with the same model."""

    executor: RanksExecutor
    alone: InlineExecutor
    processes: LocalRanks
    stages: int


@pytest.fixture(scope="module")
def config(checkpoint: Callable[..., Path]) -> Callable[..., EngineConfig]:
    def make(name: str, parallel: ParallelConfig) -> EngineConfig:
        directory = checkpoint(name, num_hidden_layers=LAYERS, vocab_size=VOCAB)
        cache = CacheConfig(block_size=16)
        return EngineConfig(model=str(directory), device="cpu", threads=1, parallel=parallel, cache=cache)

    return make


IN_SUITE = "llama, tensor 2 x pipeline 2"


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(case, id=name, marks=[pytest.mark.proof] * (name != IN_SUITE)) for name, case in CASES.items()
    ],
)
def ranks(request: pytest.FixtureRequest, config: Callable[..., EngineConfig]) -> Iterator[Ranks]:
    name, parallel = request.param
    started: list[LocalRanks] = []

    def start_ranks(config: EngineConfig, layout: RankLayout) -> LocalRanks:
        started.append(LocalRanks(config, layout))
        return started[-1]

    executor, alone = RanksExecutor(config(name, parallel), start_ranks), InlineExecutor(config(name, ParallelConfig()))
    try:
        executor.load(lambda phase, fraction: None)
        alone.load(lambda phase, fraction: None)
        yield Ranks(executor, alone, started[0], parallel.pipeline)
    finally:
        executor.close()
        alone.close()


@pytest.fixture(scope="module")
def split(sibling: Callable[[str], ModuleType]) -> Any:
    """How requests are served, as the threads' ranks serve them."""
    return sibling("engine/test_split_equality.py")


@pytest.mark.parametrize("sampling", ["greedy", "shaped"])
def test_tokens_are_those_of_one_rank(ranks: Ranks, split: Any, sampling: str) -> None:
    """With chunks, prefix hits, preemption and cancels, all of which happen."""
    asked = split.Asked() if sampling == "greedy" else split.Asked(sampling=split.SHAPED)
    undisturbed = split.ALONE._replace(sampling=asked.sampling)
    expected = split.serve(ranks.alone, undisturbed, 1, {}).outcome
    events = split.serve(ranks.executor, asked, ranks.stages, split.CANCELLED)
    left = set(split.CANCELLED.values())
    stayed = [key for key in range(len(split.LENGTHS)) if key not in left]
    assert [events.outcome.tokens[key] for key in stayed] == [expected.tokens[key] for key in stayed]
    assert events.unfinished_chunks > 2
    assert events.preemptions > 0
    assert sum(events.outcome.cached.values()) > 0
    assert events.outcome.most_in_flight == ranks.stages


def test_logprobs_come_with_the_tokens(ranks: Ranks, split: Any) -> None:
    asked = split.ALONE._replace(sampling=split.ResolvedSampling(logprobs=3))
    expected = split.serve(ranks.alone, asked, 1, {}).outcome.logprobs
    outcome = split.serve(ranks.executor, asked, ranks.stages, {}).outcome
    for key, theirs in expected.items():
        assert [each.ids for each in outcome.logprobs[key]] == [each.ids for each in theirs]
        assert [each.chosen for each in outcome.logprobs[key]] == pytest.approx(
            [each.chosen for each in theirs], abs=1e-4
        )


def test_a_killed_rank_takes_everything_with_it(ranks: Ranks, split: Any) -> None:
    """The last of the tests that need these ranks."""
    told: list[CharoniaError] = []
    ranks.executor.watch(told.append)
    pids = ranks.processes.pids
    os.kill(pids[-1], signal.SIGKILL)
    name = f"rank {len(pids) - 1} of {len(pids)}"
    with pytest.raises(Unavailable, match=rf"^{name}.* died \(exit code -9\)$"):
        split.serve(ranks.executor, split.Asked(), ranks.stages, {})
    ranks.executor.close()
    assert [error.message.startswith(name) for error in told] == [True]
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


def test_what_does_not_fit_the_model_is_said_by_a_rank(config: Callable[..., EngineConfig]) -> None:
    parallel = ParallelConfig(layers=(LAYERS + 1,))
    executor = RanksExecutor(config("llama", parallel))
    try:
        with pytest.raises(InvalidArgument, match=r"5"):
            executor.load(lambda phase, fraction: None)
    finally:
        executor.close()


@pytest.mark.proof
def test_a_rank_that_fails_while_the_other_waits_for_it_ends_the_start(
    config: Callable[..., EngineConfig], tmp_path: Path
) -> None:
    """The last stage's, whose weights are not all there: the first has loaded its own, and waits."""
    broken = msgspec.structs.replace(config("llama", ParallelConfig(pipeline=2)), model=str(tmp_path / "broken"))
    shutil.copytree(config("llama", ParallelConfig()).model, broken.model)
    file = Path(broken.model) / "model.safetensors"
    tensors = load_file(file)
    missing = f"model.layers.{LAYERS - 1}.mlp.down_proj.weight"
    del tensors[missing]
    save_file(tensors, file, {"format": "pt"})
    executor = RanksExecutor(broken)
    try:
        with pytest.raises(InvalidArgument, match=missing):
            executor.load(lambda phase, fraction: None)
    finally:
        executor.close()


def test_a_stages_ranks_are_neighbours() -> None:
    layout = RankLayout(tensor=2, pipeline=3)
    assert layout.world == 6
    assert [list(stage) for stage in layout.stages()] == [[0, 1], [2, 3], [4, 5]]
    assert [layout.stage_of(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]


def test_the_first_of_the_last_stage_reports() -> None:
    assert RankLayout(2, 3).result_rank == 4
    assert RankLayout(4, 1).result_rank == 0
    assert RankLayout(1, 3).result_rank == 2


def test_names_say_where_a_rank_stands() -> None:
    assert RankLayout(2, 2).rank_name(3) == "rank 3 of 4 (stage 1, tensor 1)"
    assert RankLayout(2, 1).rank_name(1) == "rank 1 of 2"
    assert str(RankLayout(2, 2)) == "4 ranks (tensor 2, pipeline 2)"
