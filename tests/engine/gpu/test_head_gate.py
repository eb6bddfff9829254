"""Gates and norms of heads on the interpreter beside torch's."""

from types import ModuleType
from typing import Any

import pytest
import torch

from charonia.engine.cpu.recurrent import HeadNorm
from charonia.engine.layers.head_gate import TorchHeadGate

HEADS, SIZE, COLUMN = 3, 20, 7
PLAIN, OWN = torch.linspace(0.5, 2, SIZE), torch.linspace(0.5, 2, HEADS * SIZE).view(HEADS, SIZE)
NORMS = {
    "sigmoid alone": None,
    "without weight": HeadNorm(None, 1e-6, gates_first=True),
    "before its gate": HeadNorm(PLAIN, 1e-6),
    "behind its gate": HeadNorm(OWN, 1e-5, gates_first=True),
    "by a sigmoid": HeadNorm(PLAIN, 1e-6, sigmoid=True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("norm", NORMS)
def test_heads_are_gated_as_by_torch(kernels: dict[str, ModuleType], norm: str, dtype: torch.dtype) -> None:
    module: Any = kernels["head_gate"]
    sizes = HEADS, SIZE, COLUMN, NORMS[norm]
    x, gates = (torch.randn(4, width, generator=torch.Generator().manual_seed(width)) for width in (60, 70))
    x, gates = x.to(dtype), (30 * gates).to(dtype)
    for rows in (0, 1, 4):
        expected = TorchHeadGate(*sizes)(x[:rows], gates[:rows])
        torch.testing.assert_close(module.TritonHeadGate(*sizes)(x[:rows], gates[:rows]), expected)
