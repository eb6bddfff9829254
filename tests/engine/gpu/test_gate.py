"""Gates on the interpreter beside torch's."""

from types import ModuleType

import pytest
import torch

from charonia.engine.cpu.elementwise import ACTIVATION_CODES, UNGATED
from charonia.engine.layers.mlp import TorchGate


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("activation", [name for name in ACTIVATION_CODES if name not in UNGATED.values()])
def test_gates(kernels: dict[str, ModuleType], activation: str, dtype: torch.dtype) -> None:
    for rows, size in ((0, 8), (1, 5), (3, 1027)):
        x = (torch.randn(rows, 2 * size, generator=torch.Generator().manual_seed(size)) * 30).to(dtype)
        expected = TorchGate(activation)(x.double()).to(dtype)
        torch.testing.assert_close(kernels["gate"].TritonGate(activation)(x), expected)
