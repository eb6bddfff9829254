"""Grouped experts on the interpreter beside one expert after the other."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from charonia.engine.checkpoint.build_context import BuildContext, Shard, SingleRank, TensorGroup
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint
from charonia.engine.checkpoint.weights import CheckpointWeights, WeightLoader
from charonia.engine.layers.mlp import GatedMLPSpec, MixtureOfExperts, TorchGate
from charonia.engine.layers.step_context import StepContext

COUNT, PER_TOKEN = 6, 2


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def one_by_one(x: Tensor, gate_up: Tensor, down: Tensor, chosen: Tensor, weights: Tensor, first: int) -> Tensor:
    """The reference in float64; experts that are not among the given are left out."""
    out = torch.zeros_like(x, dtype=torch.float64)
    for token, (row, experts) in enumerate(zip(x.double(), chosen.tolist(), strict=True)):
        for choice, expert in enumerate(experts):
            if 0 <= expert - first < len(down):
                inner = TorchGate("silu")(gate_up[expert - first].double() @ row)
                out[token] += weights[token, choice] * (down[expert - first].double() @ inner)
    return out


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.permutations(range(COUNT)), max_size=45),
    st.sampled_from(((0, COUNT), (2, 3), (5, 1))),
    st.sampled_from(((16, 16), (40, 70), (72, 24))),
    st.sampled_from((torch.float32, torch.float16)),
)
def test_a_mixture(
    kernels: dict[str, ModuleType],
    choices: list[list[int]],
    mine: tuple[int, int],
    sizes: tuple[int, int],
    dtype: torch.dtype,
) -> None:
    (first, count), (hidden, inner), module = mine, sizes, kernels["experts"]
    chosen = torch.tensor([each[:PER_TOKEN] for each in choices], dtype=torch.int64).view(-1, PER_TOKEN)
    x, weights = random(len(choices), hidden, dtype=dtype), random(len(choices), PER_TOKEN, dtype=torch.float32).abs()
    gate_up, down = random(count, 2 * inner, hidden, dtype=dtype) / 8, random(count, hidden, inner, dtype=dtype) / 8
    found = module.TritonExperts(gate_up, down, "silu", first)(x, chosen, weights, None)
    expected = one_by_one(x, gate_up, down, chosen, weights, first)
    torch.testing.assert_close(found, expected.to(dtype), rtol=4e-3, atol=1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("tokens", [1, 300, 1500])
def test_choices_are_cut_into_blocks_by_expert(kernels: dict[str, ModuleType], tokens: int) -> None:
    """All but the first are chosen, one far more often than fits into a block."""
    module: Any = kernels["experts"]
    chosen = torch.randint(1, COUNT, (tokens, PER_TOKEN), generator=torch.Generator().manual_seed(0))
    chosen[tokens // 2 :, 1] = 4
    order, blocks = module._align(chosen, 1, COUNT - 2, 16)
    mine = chosen.flatten() < COUNT - 1
    expected = chosen.flatten().argsort(stable=True)
    taken = int(mine.sum())
    assert torch.equal(order[:taken].long(), expected[:taken])
    found = [row for row in blocks.t().tolist() if row[0] >= 0]
    covered = [(expert, at) for expert, first, end in found for at in range(first, min(first + 16, end))]
    assert covered == [(int(chosen.flatten()[at]) - 1, number) for number, at in enumerate(expected[:taken].tolist())]


class OneOfTwo:
    """A rank whose sums are added by the test."""

    size = 2

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial

    def all_gather(self, part: Tensor, total: int) -> Tensor:
        raise AssertionError("a mixture gathers nothing")


def mixture(checkpoint: Path, group: TensorGroup, whole: bool = False) -> MixtureOfExperts:
    spec = open_checkpoint(str(checkpoint)).spec
    assert spec.experts is not None
    expert = GatedMLPSpec("model.layers.0.mlp", spec.hidden_size, spec.experts.intermediate_size)
    context = BuildContext(torch.float32, torch.device("cpu"), 64, Shard(group), whole_experts=whole)
    return MixtureOfExperts(WeightLoader(CheckpointWeights(checkpoint), context), expert, spec.experts)


def test_a_layer_is_that_of_the_cpu(checkpoint: Callable[..., Path], request: pytest.FixtureRequest) -> None:
    """Alone, and as the sum of two ranks that have slices of experts or whole ones."""
    directory, context = checkpoint("qwen3-moe"), StepContext(cast(Any, None), cast(Any, None))
    x = random(9, open_checkpoint(str(directory)).spec.hidden_size, dtype=torch.float32)
    expected = mixture(directory, SingleRank())(x, context)
    request.getfixturevalue("interpreted")
    layer = mixture(directory, SingleRank())
    assert not layer.host_bound
    torch.testing.assert_close(layer(x, context), expected)
    for whole in (False, True):
        ranks = [mixture(directory, OneOfTwo(rank), whole)(x, context) for rank in (0, 1)]
        torch.testing.assert_close(ranks[0] + ranks[1], expected)
