"""Products of heads at every level: against torch, and the same bits whatever shares the call, on any number of
threads."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from charonia.engine.cpu.head_products import FusedHeadProducts
from charonia.engine.cpu.memory import HugePageArena
from charonia.engine.layers.latent_attention import TorchHeadProducts

HEADS, INPUTS, OUTPUTS = 5, 24, 40


@pytest.mark.parametrize("rows", [1, 7, 300, 1100])
@pytest.mark.parametrize(("passed", "ends"), [(16, True), (0, False)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_each_head_has_its_own_product(
    level: str, dtype: torch.dtype, passed: int, ends: bool, rows: int, by_threads: Callable[..., list[Tensor]]
) -> None:
    """Of 300 rows three heads go together, of 1,100 one."""
    generator = torch.Generator().manual_seed(rows)

    def drawn(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator).to(dtype)

    weights, x = drawn(HEADS, OUTPUTS, INPUTS), drawn(rows, HEADS * (INPUTS + passed))
    last = drawn(rows, OUTPUTS + passed) if ends else None
    fused = FusedHeadProducts(weights, passed, HugePageArena())
    first, *others = by_threads(lambda: fused(x, last))
    right = TorchHeadProducts(weights.double(), passed)(x.double(), None if last is None else last.double())
    assert first.shape == right.shape
    assert (first.double() - right).abs().max() < (1e-4 if dtype == torch.float32 else 0.1)
    assert all(torch.equal(first, other) for other in others)
    middle = slice(rows // 2, rows // 2 + 2)
    assert torch.equal(fused(x[middle], None if last is None else last[middle]), first[middle])
