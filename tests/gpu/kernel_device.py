"""Where kernels are tested: on a CUDA device, or with CHARONIA_KERNELS=triton on the interpreter, without bf16."""

import os

import pytest
import torch
from torch import Tensor

INTERPRETED = os.environ.get("CHARONIA_KERNELS") == "triton"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]
NEEDS_DEVICE = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (INTERPRETED or torch.cuda.is_available()), reason="no CUDA device"),
]


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(DEVICE, dtype)
