"""Tokens chosen from logits in C: the likeliest, or one drawn by temperature, top-k, top-p and min-p.

torch takes several times as long, up to sixty times where it has to sort, and numpy knows no bfloat16.
"""

import numpy as np
import torch
from torch import Tensor

from ..step_batch import SamplingArray
from . import library


def argmax(x: Tensor) -> Tensor:
    """The index int64 [S] of the largest number in each row of x [S, n], the first of equals, on any device. The C
    kernel orders -0 below 0, and a NaN above or below all numbers, by its sign."""
    if not library.supports(x.dtype, x.device):
        return x.argmax(-1)
    x = x if x.stride(-1) == 1 else x.contiguous()
    rows, n = x.shape
    out = torch.empty(rows, dtype=torch.int64)
    sizes = rows, x.stride(0), n, library.DTYPE_CODES[x.dtype]
    library.bind_function("charonia_argmax")(x.data_ptr(), out.data_ptr(), *sizes)
    return out


def sample_tokens(logits: Tensor, sampling: SamplingArray) -> Tensor:
    """Token ids int64 [S] drawn from logits [S, vocabulary], of a dtype and device that `library.supports`. A row's
    token depends on its logits and its element of `sampling` alone, not on the rows beside it. Weights are rounded as
    floats and summed as doubles."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    sampling = np.ascontiguousarray(sampling)
    rows, n = logits.shape
    out = torch.empty(rows, dtype=torch.int64)
    addresses = logits.data_ptr(), sampling.ctypes.data, out.data_ptr()
    library.bind_function("charonia_sample")(*addresses, rows, logits.stride(0), n, library.DTYPE_CODES[logits.dtype])
    return out
