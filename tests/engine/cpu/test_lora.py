"""What adapters add to products at every level, against float64; rows, threads and batches change none of its bits."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from torch import Tensor

from charonia.engine.cpu.lora import CAdapterTable, NativeLora, pack_outputs
from charonia.engine.step_adapters import LoraPart, RankAdapter, StepAdapters

INPUTS, OUTPUTS = 67, 150
PARTS = ((0, 33), (40, 64), (110, 40))
"""Where the outputs of three matrices begin, and how many they are; some of the product's are nobody's."""


def random(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype)


def adapter(dtype: torch.dtype, ranks: Sequence[int], seed: int) -> tuple[RankAdapter, list[Tensor]]:
    """One that changes nothing of product 0, and product 1; and what it adds to that, each part's [outputs, inputs] in
    float64. A rank of 0 leaves the part out."""
    parts, added = [], []
    for (first, outputs), rank in zip(PARTS, ranks, strict=True):
        a, b, scale = random(rank, INPUTS, dtype=dtype, seed=seed), random(outputs, rank, dtype=dtype, seed=seed), 0.25
        added.append(scale * (b.double() @ a.double()))
        if rank:
            parts.append(LoraPart(first, outputs, a, pack_outputs(b).contiguous(), scale))
    products = [[], parts]
    return RankAdapter(str(seed), max(ranks), products, CAdapterTable(products)), added


def step(adapters: Sequence[RankAdapter], places: Sequence[Sequence[int]]) -> StepAdapters:
    begins = np.cumsum([0, *map(len, places)], dtype=np.int64)
    return StepAdapters(adapters, begins, np.concatenate([np.array(place, np.int64) for place in places]))


def add(x: Tensor, out: Tensor, adapted: StepAdapters) -> Tensor:
    """A copy of `out` with what is added for x."""
    found = out.clone()
    NativeLora(1, lines=64).add(x, found, adapted)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("counts", [(1, 2), (3, 14), (30, 1)], ids=str)
def test_rows_get_what_their_adapter_adds(level: str, dtype: torch.dtype, counts: tuple[int, int]) -> None:
    """Ranks that fill no tile, a part that an adapter leaves out, rows in any order, and rows without an adapter."""
    made = [adapter(dtype, ranks, seed) for seed, ranks in enumerate([(5, 16, 1), (8, 0, 3)])]
    rows = sum(counts) + 2
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(1)).tolist()
    places = [order[: counts[0]], order[counts[0] : sum(counts)]]
    x, out = random(rows, INPUTS, dtype=dtype), random(rows, OUTPUTS, dtype=dtype)
    right = out.double()
    for (_, added), mine in zip(made, places, strict=True):
        for (first, outputs), matrix in zip(PARTS, added, strict=True):
            right[mine, first : first + outputs] += x[mine].double() @ matrix.T
    found = add(x, out, step([each for each, _ in made], places))
    assert torch.allclose(found.double(), right, rtol=4 * torch.finfo(dtype).eps, atol=4e-5)
    assert torch.equal(found[order[-2:]], out[order[-2:]]), "rows without an adapter stay as they are"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_rows_bits_depend_on_no_other_row_and_no_thread(
    level: str, dtype: torch.dtype, by_threads: Callable[[Callable[[], Tensor]], list[Tensor]]
) -> None:
    made = [adapter(dtype, (6, 4, 9), seed)[0] for seed in range(2)]
    x, out = random(900, INPUTS, dtype=dtype), random(900, OUTPUTS, dtype=dtype)
    together = by_threads(lambda: add(x, out, step(made, [range(0, 900, 2), range(1, 900, 2)])))
    assert all(torch.equal(each, together[0]) for each in together)
    for row in (0, 1, 450, 899):
        alone = add(x[row : row + 1], out[row : row + 1], step([made[row % 2]], [[0]]))
        assert torch.equal(alone[0], together[0][row])
