"""Products of few rows by the kernel on the device beside torch's, in Llama-3.1-8B's shapes: a row to the bit as alone.

CHARONIA_KERNELS=triton runs smaller shapes on the interpreter, without bf16.
"""

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from charonia.engine.gpu import runtime

INTERPRETED = os.environ.get("CHARONIA_KERNELS") == "triton"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no CUDA device"),
]
DTYPES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
SHAPES = (
    [(48, 160, ""), (32, 96, "silu")] if INTERPRETED else [(6144, 4096, ""), (4096, 14336, ""), (14336, 4096, "silu")]
)
assert runtime.serves(DTYPES[0], DEVICE) or not INTERPRETED  # which asks for the interpreter before Triton comes


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("size", "inputs", "activation"), SHAPES)
def test_products_of_few_rows(size: int, inputs: int, activation: str, dtype: torch.dtype) -> None:
    """In every tile that `make gpu` measures."""
    from charonia.engine.gpu.few_rows_kernel import TILES, multiply_few_rows

    weight = random(size * (2 if activation else 1), inputs, dtype=dtype) / inputs**0.5
    x = random(runtime.FEW_ROWS, inputs, dtype=dtype)
    right = F.linear(x.float(), weight.float())
    if activation:
        gate, up = right.chunk(2, -1)
        right = F.silu(gate) * up
    bound = 2e-2 if dtype == torch.bfloat16 else 4e-3
    for tile in TILES:
        many = multiply_few_rows(x, weight, None, activation, tile)
        torch.testing.assert_close(many.float(), right, atol=bound, rtol=bound)
        for rows in (slice(15, 16), slice(2, 9)):
            assert torch.equal(multiply_few_rows(x[rows], weight, None, activation, tile), many[rows])
