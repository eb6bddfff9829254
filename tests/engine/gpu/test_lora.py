"""What adapters add to a product on a GPU, interpreted, beside float64 and beside torch's reference."""

from collections.abc import Sequence
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from charonia.engine.layers.linear import TorchLora
from charonia.engine.step_adapters import AdapterBlocks, LoraPart, RankAdapter, StepAdapters

pytestmark = pytest.mark.usefixtures("short_pieces")

SIZES, MOST, GUARD = (33, 64, 40), 70, 3
"""The outputs of a product's three matrices, which begin at 0, 40 and 110: some of its outputs are nobody's."""
BEGINS, OUTPUTS = (0, 40, 110), 155


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def adapter(kernels: dict[str, ModuleType], inputs: int, ranks: Sequence[int], seed: int) -> RankAdapter:
    """One that changes product 1 alone; a rank of 0 leaves the part out."""
    parts = [
        LoraPart(first, outputs, random(rank, inputs, seed=seed), random(rank, outputs, seed=seed + 1), 0.25)
        for first, outputs, rank in zip(BEGINS, SIZES, ranks, strict=True)
        if rank
    ]
    return recorded(kernels, str(seed), max(ranks), [[], parts])


def recorded(
    kernels: dict[str, ModuleType], digest: str, rank: int, parts: Sequence[Sequence[LoraPart]]
) -> RankAdapter:
    return RankAdapter(digest, rank, parts, kernels["lora"].AdapterRecords(parts, torch.device("cpu")))


def step(adapters: Sequence[RankAdapter], counts: Sequence[int], order: Sequence[int]) -> StepAdapters:
    begins = np.cumsum([0, *counts], dtype=np.int64)
    return StepAdapters(adapters, begins, np.array(order[: begins[-1]], np.int64))


RANKS = st.lists(st.sampled_from((0, 1, 5, 16, 70)), min_size=3, max_size=3)


@settings(max_examples=4, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.integers(1, 20), RANKS), min_size=1, max_size=2), st.just(67), st.integers(0, 9))
@example([(3, [2, 0, 0])], 129, 0)  # in two pieces
def test_rows_get_what_their_adapter_adds(
    kernels: dict[str, ModuleType], asked: list[tuple[int, list[int]]], inputs: int, seed: int
) -> None:
    """Ranks beyond a tile, parts left out, places in any order, and some without an adapter, which stay as they are;
    so does what lies behind the outputs. The same with blocks that are nobody's, as in a recorded step."""
    made = [adapter(kernels, inputs, ranks, 10 * at) for at, (_, ranks) in enumerate(asked)]
    counts = [count for count, _ in asked]
    rows = sum(counts) + 2
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(seed)).tolist()
    adapters = step(made, counts, order)
    x = random(rows, inputs, seed=seed)
    whole = random(rows, OUTPUTS + GUARD, seed=seed + 1)
    right = whole.double()
    TorchLora(1).add(x.double(), right[:, :OUTPUTS], step([_double(each) for each in made], counts, order))
    lora = kernels["lora"].TritonLora(1, SIZES, MOST)
    replayed = StepAdapters.on_device(AdapterBlocks(torch.from_numpy(adapters.pack(rows + 2)), rows))
    for each in (adapters, replayed):
        found = whole.clone()
        lora.add(x, found[:, :OUTPUTS], each)
        assert torch.allclose(found.double(), right, rtol=1e-4, atol=1e-3)
        assert torch.equal(found[order[-2:]], whole[order[-2:]])
        assert torch.equal(found[:, OUTPUTS:], whole[:, OUTPUTS:])


def _double(made: RankAdapter) -> RankAdapter:
    parts = [[part._replace(a=part.a.double(), b=part.b.double()) for part in each] for each in made.parts]
    return RankAdapter(made.digest, made.rank, parts)


def test_a_row_depends_on_no_other(kernels: dict[str, ModuleType]) -> None:
    made = [adapter(kernels, 67, (5, 16, 1), 0), adapter(kernels, 67, (70, 0, 3), 10)]
    x, out = random(40, 67, seed=1), random(40, OUTPUTS, seed=2)
    lora, together = kernels["lora"].TritonLora(1, SIZES, MOST), out.clone()
    lora.add(x, together, step(made, (21, 17), range(40)))
    for row in (0, 17, 25, 39):
        alone = out[row : row + 1].clone()
        if row < 38:
            lora.add(x[row : row + 1], alone, step([made[row >= 21]], (1,), [0]))
        assert torch.equal(alone[0], together[row])


def test_halves_are_rounded_once(kernels: dict[str, ModuleType]) -> None:
    made = adapter(kernels, 128, (16, 16, 16), 0)
    half = [[part._replace(a=part.a.half(), b=part.b.half()) for part in each] for each in made.parts]
    adapters = step([recorded(kernels, "", 16, half)], (9,), range(9))
    x, out = random(9, 128, seed=1).half(), torch.zeros(9, OUTPUTS, dtype=torch.float16)
    kernels["lora"].TritonLora(1, SIZES, 16).add(x, out, adapters)
    for part in half[1]:
        wide = (x.double() @ part.a.double().T * part.scale) @ part.b.double()
        found = out[:, part.first : part.first + part.outputs].double()
        assert (found - wide).abs().max() < 2e-3 * wide.abs().max()


@pytest.mark.parametrize("lengths", [(), (1,), (16, 17), (40, 1, 1, 33)])
def test_blocks_have_one_adapter_each(kernels: dict[str, ModuleType], lengths: tuple[int, ...]) -> None:
    adapters = [adapter(kernels, 4, (1, 0, 0), seed) for seed in range(len(lengths))]
    total = sum(lengths)
    places = np.arange(100, 100 + total)
    found = StepAdapters(adapters, np.cumsum([0, *lengths], dtype=np.int64), places).pack(max(total, 1) + 3)
    assert found[0, :total].tolist() == places.tolist()
    seen = []
    for address, first, end in found[1:].T.tolist():
        if address:
            [owner] = [each for each in adapters if each.address == address]
            assert 0 < end - first <= 16
            seen += [(owner.digest, line) for line in range(first, end)]
    owners = np.repeat([each.digest for each in adapters], lengths).tolist()
    assert seen == [*zip(owners, range(total), strict=True)]
