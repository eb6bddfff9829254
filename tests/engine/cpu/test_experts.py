"""Mixtures of experts at every level: against routing by torch and experts one by one, and the same bits whatever
shares a call, on any number of threads."""

from functools import cache

import pytest
import torch
from torch import Tensor

from charonia.engine.cpu.elementwise import FusedGate
from charonia.engine.cpu.experts import FusedMixture, Routing, gate_rows
from charonia.engine.cpu.matmul import (
    GroupedFormat,
    GroupedMatmul,
    GroupedRows,
    MatmulFormat,
    MatrixProduct,
    PackedMatmul,
)
from charonia.engine.cpu.memory import HugePageArena
from tests.engine.cpu.conftest import ByThreads

HIDDEN, INNER, COUNT = 72, 40, 24
LIKELY = Routing(COUNT, 4, sigmoid=False, normalised=True)
BIAS = torch.linspace(-0.2, 0.2, COUNT)[torch.randperm(COUNT, generator=torch.Generator().manual_seed(7))]
JUDGED = Routing(COUNT, 3, True, True, 1e-6, 2.5, BIAS, BIAS + 1, groups=6, chosen_groups=2, group_judges=2)
KINDS = [
    pytest.param(torch.float32, "float32", id="float32"),
    pytest.param(torch.bfloat16, "bfloat16", id="bfloat16"),
    pytest.param(torch.bfloat16, "int8", id="int8"),
    pytest.param(torch.bfloat16, "mixed", id="mixed"),
]


def product(number: int, outputs: int, inputs: int, dtype: torch.dtype, kept: str) -> MatrixProduct:
    """Of a mixed mixture, every second expert in groups."""
    generator = torch.Generator().manual_seed(1000 * number + outputs)
    bias = torch.randn(outputs, generator=generator)
    if kept == "mixed" and number % 2:
        grouped = GroupedMatmul(GroupedFormat(outputs, inputs, 32, False, dtype, dtype), bias, HugePageArena())
        codes = torch.randint(16, (outputs, inputs), generator=generator, dtype=torch.uint8)
        grouped.pack(0, GroupedRows(codes, torch.rand(outputs, -(-inputs // 32), generator=generator) / 64))
        return grouped
    numbers = torch.int8 if kept in ("int8", "mixed") else dtype
    packed = PackedMatmul(MatmulFormat(outputs, inputs, numbers, dtype, dtype), bias, HugePageArena())
    packed.pack(0, torch.randn(outputs, inputs, generator=generator) / inputs**0.5)
    return packed


def experts(dtype: torch.dtype, kept: str) -> list[tuple[MatrixProduct, MatrixProduct]]:
    return [
        (product(number, 2 * INNER, HIDDEN, dtype, kept), product(number, HIDDEN, INNER, dtype, kept))
        for number in range(COUNT)
    ]


@cache
def inputs(rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows, and scores that are well apart."""
    generator = torch.Generator().manual_seed(rows)
    scores = torch.rand(rows, COUNT, generator=generator).argsort(-1) / 4
    return torch.randn(rows, HIDDEN, generator=generator).to(dtype), scores


def chosen(routing: Routing, scores: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's experts and their weights, as papers have them."""
    likely = scores.sigmoid() if routing.sigmoid else scores.softmax(-1)
    judged = likely if routing.bias is None else likely + routing.bias
    groups = judged.view(len(scores), routing.groups, -1)
    best = groups.topk(routing.group_judges, -1).values.sum(-1).topk(routing.chosen_groups, -1).indices
    left = torch.full_like(groups, -torch.inf).scatter(1, best.unsqueeze(-1).expand(-1, -1, groups.shape[-1]), 0.0)
    numbers = (judged + left.flatten(1)).topk(routing.per_token, -1).indices
    weights = likely.gather(-1, numbers)
    if routing.normalised:
        weights = weights / (weights.sum(-1, keepdim=True) + routing.least_sum)
    return numbers, weights * (1.0 if routing.scales is None else routing.scales[numbers]) * routing.scale


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("routing", [LIKELY, JUDGED], ids=["softmax", "groups"])
@pytest.mark.parametrize(("dtype", "kept"), KINDS)
def test_a_mixture(dtype: torch.dtype, kept: str, routing: Routing, by_threads: ByThreads) -> None:
    """Of many rows, experts are computed in several parts."""
    made = experts(dtype, kept)
    mixture = FusedMixture(routing, made, 0, "silu", dtype)
    x, scores = inputs(600, dtype)
    found, *others = by_threads(lambda: mixture(x, scores))
    assert all(torch.equal(found, other) for other in others)
    for rows in (slice(0, 1), slice(7, 40)):
        assert torch.equal(mixture(x[rows], scores[rows]), found[rows])
    expected = torch.zeros(len(x), HIDDEN, dtype=torch.float64)
    numbers, weights = chosen(routing, scores.double())
    for number, (gate_up, down) in enumerate(made):
        row, slot = (numbers == number).nonzero(as_tuple=True)
        results = down(FusedGate("silu")(gate_up(x[row])))
        expected.index_add_(0, row, results.double() * weights[row, slot].unsqueeze(-1))
    assert (found - expected).abs().max() < (1e-5 if dtype == torch.float32 else 2**-8) * expected.abs().max()


@pytest.mark.usefixtures("level")
def test_ranks_have_some_experts_each() -> None:
    made = experts(torch.float32, "float32")
    x, scores = inputs(5, torch.float32)
    parts = [FusedMixture(LIKELY, made[at : at + 8], at, "silu", torch.float32)(x, scores) for at in (0, 8, 16)]
    whole = FusedMixture(LIKELY, made, 0, "silu", torch.float32)(x, scores)
    assert (sum(parts) - whole).abs().max() < 1e-5
    assert len({part.abs().max().item() for part in parts}) == 3


@pytest.mark.usefixtures("level")
def test_fewer_experts_than_threads_and_none_that_a_row_chose(by_threads: ByThreads) -> None:
    """And no rows at all."""
    routing, made = Routing(COUNT, 1, sigmoid=True, normalised=False), experts(torch.float32, "float32")[:2]
    here, elsewhere = (FusedMixture(routing, made, first, "silu", torch.float32) for first in (0, 22))
    x, scores = inputs(5, torch.float32)
    scores = scores.index_fill(1, torch.tensor([1]), 90.0)
    found, *others = by_threads(lambda: here(x, scores))
    assert all(torch.equal(found, other) for other in others)
    assert found.any(1).all()
    assert not elsewhere(x, scores).any()
    assert here(x[:0], scores[:0]).shape == (0, HIDDEN)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("routing", [LIKELY, JUDGED], ids=["softmax", "groups"])
def test_scores_that_are_no_numbers_show_in_their_row_alone(routing: Routing) -> None:
    mixture = FusedMixture(routing, experts(torch.float32, "float32"), 0, "silu", torch.float32)
    x, scores = inputs(3, torch.float32)
    right = mixture(x, scores)
    found = mixture(x, torch.stack((scores[0], torch.full_like(scores[1], torch.nan), scores[2])))
    assert torch.equal(found[[0, 2]], right[[0, 2]])
    assert found[1].isnan().all()


def test_more_experts_than_may_be_chosen_are_refused() -> None:
    narrow = JUDGED._replace(per_token=9)
    with pytest.raises(ValueError, match="9 experts can't be chosen of 24"):
        FusedMixture(narrow, [], 0, "silu", torch.float32)


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_with_a_gate(dtype: torch.dtype) -> None:
    x, gates = inputs(9, dtype)[0].clone(), torch.linspace(-90, 90, 9).unsqueeze(-1)
    expected = x.double() * gates.sigmoid().to(dtype).double()
    torch.testing.assert_close(gate_rows(x, gates), expected.to(dtype))
