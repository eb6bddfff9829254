"""What of a model a rank has, and what can't be split."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from charonia.core.errors import InvalidArgument
from charonia.core.resolved_sampling import ResolvedSampling
from charonia.engine.checkpoint.build_context import BuildContext, Shard, SingleRank
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint
from charonia.engine.checkpoint.model_spec import (
    CheckpointError,
    ExpertsSpec,
    KeyValueShape,
    LayerAttention,
    ModelSpec,
    RopeSpec,
)
from charonia.engine.checkpoint.partition import PipelineStage, check_partition
from charonia.engine.checkpoint.recurrence import (
    DeltaNetSpec,
    LayerState,
    Mamba2Spec,
    RecurrenceSpec,
    ShortConvolutionSpec,
)
from charonia.engine.checkpoint.weights import CheckpointWeights, TensorSlice, WeightLoader
from charonia.engine.config import CacheConfig, EngineConfig, ParallelConfig
from charonia.engine.models.registry import ARCHITECTURES, checkpoint_builder
from charonia.engine.worker.inline_executor import InlineExecutor
from charonia.engine.worker.loaded_rank import load_rank
from charonia.scheduler.plan import NewSequence, StepPlan

CPU = torch.device("cpu")
SPEC = ModelSpec(
    vocab_size=1001,
    hidden_size=64,
    intermediate_size=96,
    heads=12,
    kv_heads=4,
    head_dim=16,
    attention=(
        LayerAttention(window=8),
        LayerAttention(),
        LayerAttention(),
        LayerAttention(window=9),
        LayerAttention(),
    ),
    architecture="LlamaForCausalLM",
    norm_eps=1e-6,
    rope=RopeSpec(),
    local_rope=RopeSpec(),
    max_position=64,
    tied_embeddings=False,
    attention_bias=False,
    mlp_bias=False,
    activation="silu",
    logit_softcap=None,
    experts=None,
    dtype="float32",
)
MIXED = replace(SPEC, experts=ExpertsSpec(8, 2, 48, True, (True,) * 5))


RECURRENT = ShortConvolutionSpec(64, 3, False)
MAMBA = Mamba2Spec(8, 16, 24, 2, 4, False, True, (0.0, math.inf))
HYBRID = replace(
    SPEC,
    attention=(None, LayerAttention(), None, None, LayerAttention()),
    states=(RECURRENT.state, None, RECURRENT.state, RECURRENT.state, None),
    recurrence=RECURRENT,
)


def test_of_a_hybrid_each_stage_has_its_states_and_caches() -> None:
    mine = Shard(stage=PipelineStage(1, 2, (2, 3))).local_shape(HYBRID)
    assert mine.cached_attention == (LayerAttention(),)
    assert mine.states == (RECURRENT.state, RECURRENT.state, None)
    assert [HYBRID.state_index(layer, 2) for layer in (2, 3)] == [0, 1]
    assert HYBRID.cache_index(4, 2) == 0


@pytest.mark.parametrize(
    ("recurrence", "ranks", "reason"),
    [
        (DeltaNetSpec(2, 8, 16, 16, 4), 4, "2 key heads of its delta rule can't be shared evenly by 4 ranks"),
        (MAMBA._replace(heads=6), 4, "6 heads of Mamba-2 can't be shared evenly by 4 ranks"),
        (MAMBA._replace(groups=3), 2, "3 groups of Mamba-2's heads can be neither shared evenly by 2 ranks"),
        (ShortConvolutionSpec(1, 3, False), 2, "its 1 channels give nothing to some of 2 ranks"),
    ],
)
def test_heads_of_states_that_ranks_cannot_share_are_refused(
    recurrence: RecurrenceSpec, ranks: int, reason: str
) -> None:
    spec = replace(HYBRID, recurrence=recurrence)
    message = f"model: {reason}.*; stages of a pipeline can have its layers"
    with pytest.raises(InvalidArgument, match=message) as refusal:
        check_partition(spec, "model", ranks, PipelineStage())
    assert refusal.value.field == "tensor_parallel_size"


def test_a_rank_keeps_the_states_of_its_heads_alone() -> None:
    whole = replace(HYBRID, recurrence=MAMBA, states=(MAMBA.state, None, MAMBA.state, MAMBA.state, None))
    check_partition(whole, "model", 4, PipelineStage())
    first, *_ = Shard(Silent(3, 4)).local_shape(whole).states
    # Two of eight heads, and B and C of the one group that they are of.
    assert first == LayerState(channels=2 * 16 + 2 * 24, window=3, heads=2, rows=24, columns=16)


def test_each_stage_of_a_hybrid_attends() -> None:
    check_partition(HYBRID, "model", 1, PipelineStage(0, 2))
    with pytest.raises(InvalidArgument, match="no layer of stage 1 of 3 attends") as refusal:
        check_partition(HYBRID, "model", 1, PipelineStage(0, 3, (2, 2, 1)))
    assert refusal.value.field == "pipeline_parallel_size"


class Silent(SingleRank):
    """One rank of several, which never computes anything."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


class Keeping:
    """A pipe to nowhere."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []

    def receive(self, into: torch.Tensor) -> None:
        raise NotImplementedError

    def send(self, x: torch.Tensor) -> None:
        self.sent.append(x)


WIDE = LayerAttention(kept=KeyValueShape(2, 32, 32))
SHARING = replace(
    SPEC, attention=(LayerAttention(), WIDE, LayerAttention(), WIDE, LayerAttention()), cache_owners=(0, 1, 2, 1, 2)
)


def test_layers_that_share_a_cache_stay_with_it() -> None:
    assert SHARING.cached_attention == (LayerAttention(), WIDE, LayerAttention())
    assert [SHARING.cache_index(layer, 1) for layer in range(1, 5)] == [0, 1, 0, 1]
    assert SHARING.token_numbers == 2 * 2 * SHARING.kv_heads * SHARING.head_dim + 2 * 2 * 32
    mine = Shard(Silent(1, 2), PipelineStage(1, 2, (1, 4))).local_shape(SHARING)
    assert mine.cache_owners == (0, 1, 0, 1)
    assert mine.cached_attention == (LayerAttention(kept=KeyValueShape(1, 32, 32)), LayerAttention())
    check_partition(SHARING, "model", 2, PipelineStage(0, 2, (1, 4)))
    with pytest.raises(InvalidArgument, match=r"layer 3 attends to the keys and values of layer 1, .* stage 1 of 2"):
        check_partition(SHARING, "model", 1, PipelineStage(0, 2, (2, 3)))
    odd = replace(SHARING, attention=(*SHARING.attention[:4], LayerAttention(kept=KeyValueShape(3, 32, 32))))
    with pytest.raises(InvalidArgument, match="3 key/value heads"):
        check_partition(replace(odd, cache_owners=()), "model", 2, PipelineStage())


@pytest.mark.parametrize(
    ("total", "count", "split", "lengths"),
    [
        (24, 1, (), [24]),
        (24, 2, (), [12, 12]),
        (5, 3, (), [2, 2, 1]),
        (3, 3, (), [1, 1, 1]),
        (25, 4, (), [7, 6, 6, 6]),
        (5, 2, (4, 1), [4, 1]),
    ],
)
def test_stages_have_all_layers_in_order(total: int, count: int, split: tuple[int, ...], lengths: list[int]) -> None:
    stages = [PipelineStage(index, count, split).layers(total) for index in range(count)]
    assert [layer for layers in stages for layer in layers] == list(range(total))
    assert [len(layers) for layers in stages] == lengths


def test_a_rank_has_its_heads_and_the_layers_of_its_stage() -> None:
    mine = Shard(Silent(1, 2), PipelineStage(1, 2)).local_shape(SPEC)
    assert (mine.heads, mine.kv_heads, mine.attention) == (6, 2, (LayerAttention(window=9), LayerAttention()))
    crowded = Shard(Silent(5, 12)).local_shape(SPEC)
    assert (crowded.heads, crowded.kv_heads) == (1, 1)
    assert Shard().local_shape(SPEC) == SPEC


@pytest.mark.parametrize(
    ("spec", "tensor", "stage", "whole", "field", "says"),
    [
        (
            SPEC,
            5,
            PipelineStage(),
            False,
            "tensor_parallel_size",
            "12 attention heads can't be shared evenly by 5 ranks",
        ),
        (
            SPEC,
            6,
            PipelineStage(),
            False,
            "tensor_parallel_size",
            "4 key/value heads can be neither shared evenly by 6",
        ),
        (
            replace(SPEC, intermediate_size=3),
            4,
            PipelineStage(),
            False,
            "tensor_parallel_size",
            "its intermediate_size, 3,",
        ),
        (MIXED, 12, PipelineStage(), True, "tensor_parallel_size", "its experts, 8, gives nothing to some of 12 ranks"),
        (SPEC, 2, PipelineStage(), True, "enable_expert_parallel", "it has no experts to share"),
        (SPEC, 1, PipelineStage(0, 6), False, "pipeline_parallel_size", "5 layers can't be split over 6 stages"),
        (SPEC, 1, PipelineStage(0, 2, (2, 2)), False, "pipeline_layers", r"5 layers to one of 2 stages .*, got 2,2"),
        (SPEC, 1, PipelineStage(0, 2, (5, 0)), False, "pipeline_layers", r"at least one to each, got 5,0"),
        (SPEC, 1, PipelineStage(0, 3, (2, 3)), False, "pipeline_layers", r"one of 3 stages .*, got 2,3"),
    ],
)
def test_what_can_not_be_split_is_refused(
    spec: ModelSpec, tensor: int, stage: PipelineStage, whole: bool, field: str, says: str
) -> None:
    with pytest.raises(InvalidArgument, match=f"model here: .*{says}") as refusal:
        check_partition(spec, "here", tensor, stage, whole)
    assert refusal.value.field == field


@pytest.mark.parametrize(("tensor", "stages"), [(1, 5), (2, 1), (4, 2), (12, 5)])
def test_what_can_be_split_is_not_refused(tensor: int, stages: int) -> None:
    check_partition(SPEC, "here", tensor, PipelineStage(0, stages))
    check_partition(MIXED, "here", min(tensor, 4), PipelineStage(0, stages), whole_experts=True)


def test_a_model_that_transformers_computes_is_not_split(checkpoint: Callable[..., Path]) -> None:
    found = checkpoint_builder(open_checkpoint(checkpoint("gpt-neox")))
    for seat in (Shard(Silent(0, 2)), Shard(stage=PipelineStage(0, 2))):
        with pytest.raises(CheckpointError, match=r"GPTNeoXForCausalLM .* can't be split over ranks"):
            found.build(BuildContext(torch.float32, CPU, 64, seat))


def test_layers_of_a_pipeline_that_is_none_are_refused(checkpoint: Callable[..., Path]) -> None:
    executor = InlineExecutor(EngineConfig(model=str(checkpoint("llama")), parallel=ParallelConfig(layers=(1, 1))))
    try:
        with pytest.raises(InvalidArgument, match=r"2 layers to one of 1 stages .*, got 1,1"):
            executor.load(lambda phase, fraction: None)
    finally:
        executor.close()


def read(directory: Path, seat: Shard, whole_experts: bool = False) -> int:
    """Bytes that a rank reads."""
    spec = open_checkpoint(directory).spec
    load = WeightLoader(
        CheckpointWeights(directory), BuildContext(torch.float32, CPU, 64, seat, whole_experts=whole_experts)
    )
    ARCHITECTURES[spec.architecture](spec, load)
    return load.reading.bytes


def vectors(directory: Path) -> int:
    """Bytes of norms, which every rank has."""
    tensors = load_file(directory / "model.safetensors").values()
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor.ndim == 1)


@pytest.mark.parametrize("name", ["llama", "phi3", "gemma3"])
def test_a_rank_reads_its_slices_alone(checkpoint: Callable[..., Path], name: str) -> None:
    directory = checkpoint(name)
    whole, common = read(directory, Shard()), vectors(directory)
    shares = [read(directory, Shard(Silent(rank, 2))) for rank in range(2)]
    assert sum(shares) == whole + common
    assert shares[0] == shares[1]


@pytest.mark.parametrize("whole_experts", [False, True])
def test_of_a_mixture_a_rank_reads_its_part(checkpoint: Callable[..., Path], whole_experts: bool) -> None:
    """Of three layers two have experts, beside a router of 8 scores that every rank has."""
    directory = checkpoint("qwen3-moe")
    routers = 2 * 8 * 64 * 4
    shares = [read(directory, Shard(Silent(rank, 2)), whole_experts) for rank in range(2)]
    assert sum(shares) == read(directory, Shard()) + vectors(directory) + routers


def test_a_stage_reads_its_layers_alone(checkpoint: Callable[..., Path]) -> None:
    """Embedding and head are one tensor, which two of them have."""
    directory, pipe = checkpoint("gemma3"), Keeping()
    shares = [read(directory, Shard(stage=PipelineStage(index, 3), link=pipe)) for index in range(3)]
    table = 384 * 64 * 4
    assert sum(shares) == read(directory, Shard()) + table
    assert shares[1] < min(shares[0], shares[2])


def plan(step: int, start: int, count: int) -> StepPlan:
    """`count` tokens of row 0 from `start` on, of a sequence that enters at 0."""
    new = (NewSequence(0, np.arange(1, 9, dtype=np.int32), 0, ResolvedSampling()),) if step == 0 else ()
    blocks = [[0, 0]] if step == 0 else []
    row, starts, counts = (np.array([value], np.int32) for value in (0, start, count))
    appended = np.array(blocks, np.int32).reshape(-1, 2)
    return StepPlan(
        step, row, starts, counts, np.array([False]), np.zeros(1, np.int32), appended, new, np.zeros(0, np.int32)
    )


@pytest.mark.parametrize("name", ["llama", "qwen3-moe", "gemma2"])
def test_what_a_stage_has_sent_it_writes_to_no_more(checkpoint: Callable[..., Path], name: str) -> None:
    config = EngineConfig(model=str(checkpoint(name)), device="cpu", cache=CacheConfig(block_size=16))
    pipe = Keeping()
    runner = load_rank(config, Shard(stage=PipelineStage(0, 2), link=pipe)).runner
    runner.allocate(2)
    first = runner.run_step(plan(0, 0, 4))
    before = pipe.sent[0].clone()
    runner.run_step(plan(1, 4, 4))
    assert pipe.sent[0].equal(before)
    assert not pipe.sent[1].equal(before)
    assert len(first.rows) == len(first.tokens) == 0, "it chooses nothing"


def test_a_slice_of_columns_is_not_copied(checkpoint: Callable[..., Path]) -> None:
    weights, name = CheckpointWeights(checkpoint("llama")), "model.layers.0.mlp.down_proj.weight"
    left, right = (weights.read(TensorSlice(name, (64, 96), columns=slice(*half))) for half in ((0, 48), (48, 96)))
    assert left.stride() == right.stride() == (96, 1)
    assert right.data_ptr() - left.data_ptr() == 48 * 4
