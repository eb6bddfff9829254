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
from charonia.engine.checkpoint.code_forms import CodeForm, Zeros, dequantise_codes
from charonia.engine.checkpoint.hf_checkpoint import open_checkpoint
from charonia.engine.checkpoint.weights import CheckpointWeights, WeightLoader
from charonia.engine.cpu.matmul import GroupedFormat, GroupedRows
from charonia.engine.layers.mlp import GatedMLPSpec, MixtureOfExperts, TorchGate
from charonia.engine.layers.step_context import StepContext

COUNT, PER_TOKEN = 6, 2
FP8 = torch.float8_e4m3fn


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
    chosen = torch.tensor([choice[:PER_TOKEN] for choice in choices], dtype=torch.int64).view(-1, PER_TOKEN)
    x, weights = random(len(choices), hidden, dtype=dtype), random(len(choices), PER_TOKEN, dtype=torch.float32).abs()
    gate_up, down = random(count, 2 * inner, hidden, dtype=dtype) / 8, random(count, hidden, inner, dtype=dtype) / 8
    stacks = gate_up.flatten(0, 1), down.flatten(0, 1)
    found = module.TritonExperts(*stacks, "silu", range(first, first + count))(x, chosen, weights, None)
    expected = one_by_one(x, gate_up, down, chosen, weights, first)
    torch.testing.assert_close(found, expected.to(dtype), rtol=4e-3, atol=1e-5 if dtype == torch.float32 else 1e-2)


def through_codes(module: Any, x: Tensor, kind: torch.dtype, group: int) -> Tensor:
    """What is left of x [n, inputs] in codes, float64."""
    codes, scales = module.quantise_rows(x.contiguous(), kind, group)
    return (codes.double().unflatten(1, (-1, group or x.shape[1])) * scales.view(len(x), -1, 1)).flatten(1)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows of experts elsewhere hold anything
@settings(max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.permutations(range(COUNT)), max_size=12),
    st.sampled_from(((0, COUNT), (2, 3), (5, 1))),
    st.sampled_from(((torch.int8, 0, 40, 70), (FP8, 0, 72, 24), (FP8, 32, 64, 96), (FP8, 64, 128, 64))),
    st.sampled_from((torch.float32, torch.float16)),
)
def test_a_mixture_of_codes(
    kernels: dict[str, ModuleType],
    choices: list[list[int]],
    mine: tuple[int, int],
    form: tuple[torch.dtype, int, int, int],
    dtype: torch.dtype,
) -> None:
    """Tokens, weights, and what is between the two products, each in codes; rounded elsewhere by float32 alone, so a
    code may be the next one."""
    (first, count), (kind, group, hidden, inner), module = mine, form, kernels["experts"]
    chosen = torch.tensor([choice[:PER_TOKEN] for choice in choices], dtype=torch.int64).view(-1, PER_TOKEN)
    x, weights = random(len(choices), hidden, dtype=dtype), random(len(choices), PER_TOKEN, dtype=torch.float32).abs()
    gate_up, down = random(count * 2 * inner, hidden, dtype=dtype) / 8, random(count * hidden, inner, dtype=dtype) / 8
    stacks = (module.quantise_rows(each, kind, group) for each in (gate_up, down))
    found = module.TritonExperts(*stacks, "silu", range(first, first + count))(x, chosen, weights, None)
    assert found.dtype == dtype
    expected = torch.zeros(len(x), hidden, dtype=torch.float64)
    halves, downs = (
        through_codes(module, each, kind, group).view(count, -1, each.shape[1]) for each in (gate_up, down)
    )
    for token, row in enumerate(through_codes(module, x, kind, group) if len(x) else ()):
        for expert, weight in zip((chosen[token] - first).tolist(), weights[token].double(), strict=True):
            if 0 <= expert < count:
                between = TorchGate("silu")(halves[expert] @ row).to(dtype)
                expected[token] += weight * downs[expert] @ through_codes(module, between[None], kind, group)[0]
    largest = float(expected.abs().max()) if len(x) else 0.0
    torch.testing.assert_close(found.double(), expected, rtol=4e-3, atol=5e-3 * largest)


@pytest.mark.parametrize(
    ("bits", "group", "zeros", "tokens"),
    [(4, 32, Zeros.MIDDLE, 5), (4, 128, Zeros.POINTS, 60), (8, 16, Zeros.OFFSETS, 5), (8, 64, Zeros.POINTS, 1)],
)
def test_a_mixture_of_integers_in_groups(
    kernels: dict[str, ModuleType], bits: int, group: int, zeros: Zeros, tokens: int
) -> None:
    """Of five experts, of which some rows choose none and nobody the last; the last group of both is not full."""
    first, count, hidden, inner, module = 1, 4, 150, 72, kernels["grouped_matmul"]
    generator = torch.Generator().manual_seed(bits * group)
    chosen = torch.randint(0, 4, (tokens, PER_TOKEN), generator=generator)
    x, weights = random(tokens, hidden, dtype=torch.float16), random(tokens, PER_TOKEN, dtype=torch.float32).abs()
    stacks, wide = [], []
    for outputs, inputs in ((count * 2 * inner, hidden), (count * hidden, inner)):
        some, groups = (outputs, -(-inputs // group)), torch.Generator().manual_seed(outputs)
        codes = torch.randint(0, 1 << bits, (outputs, inputs), generator=groups, dtype=torch.uint8)
        scales = torch.rand(some, generator=groups).half().float() / (1 << bits)
        points = torch.randint(0, 1 << bits, some, generator=groups, dtype=torch.uint8)
        kept = points if zeros is Zeros.POINTS else None, scales * 7 if zeros is Zeros.OFFSETS else None
        form = GroupedFormat(
            outputs, inputs, group, zeros is Zeros.POINTS, x.dtype, x.dtype, bits, zeros is Zeros.OFFSETS
        )
        stacks.append(module.GroupedWeights(form, x.device))
        stacks[-1].pack(0, GroupedRows(codes, scales, *kept))
        wide.append(dequantise_codes(GroupedRows(codes, scales, *kept), CodeForm(bits, group, zeros)))
    numbers = range(first, first + count)
    found = kernels["experts"].TritonExperts(*stacks, "silu", numbers)(x, chosen, weights, None)
    expected = one_by_one(x, wide[0].view(count, -1, hidden), wide[1].view(count, -1, inner), chosen, weights, first)
    torch.testing.assert_close(found.double(), expected, rtol=4e-3, atol=4e-3 * float(expected.abs().max()))


@pytest.mark.parametrize("tokens", [1, 300, 1500])
def test_choices_are_cut_into_blocks_by_expert(kernels: dict[str, ModuleType], tokens: int) -> None:
    """All but the first are chosen, one far more often than fits into a block."""
    module: Any = kernels["expert_blocks"]
    chosen = torch.randint(1, COUNT, (tokens, PER_TOKEN), generator=torch.Generator().manual_seed(0))
    chosen[tokens // 2 :, 1] = 4
    order, blocks = module.sort_by_expert(chosen, 1, COUNT - 2, 16)
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
    x = random(4, open_checkpoint(str(directory)).spec.hidden_size, dtype=torch.float32)
    expected = mixture(directory, SingleRank())(x, context)
    request.getfixturevalue("interpreted")
    layer = mixture(directory, SingleRank())
    assert not layer.host_bound
    torch.testing.assert_close(layer(x, context), expected)
    for whole in (False, True):
        ranks = [mixture(directory, OneOfTwo(rank), whole)(x, context) for rank in (0, 1)]
        torch.testing.assert_close(ranks[0] + ranks[1], expected)
