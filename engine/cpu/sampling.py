"""Tokens chosen from logits in C: the likeliest, or one drawn by temperature, top-k, top-p and min-p; of all, or of
those that a mask allows.

torch takes several times as long, up to sixty times where it has to sort, and numpy knows no bfloat16.
"""

import numpy as np
import torch
from torch import Tensor

from ...scheduler.plan import MaskArray
from ..step_batch import SamplingArray, to_device
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


def rank_tokens(logits: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithms of the sums of exponentials float64 [S] of float32 logits [S, vocabulary] on a device that
    `library.supports`, and int64 [S] how many tokens are likelier than int64 `tokens` [S], and 1. Each row's are the
    same whatever rows are beside it."""
    logits = logits if logits.stride(-1) == 1 else logits.contiguous()
    tokens = tokens.contiguous()
    rows, n = logits.shape
    normalisers = torch.empty(rows, dtype=torch.float64)
    ranks = torch.empty(rows, dtype=torch.int64)
    addresses = logits.data_ptr(), tokens.data_ptr(), normalisers.data_ptr(), ranks.data_ptr()
    library.bind_function("charonia_rank_tokens")(*addresses, rows, logits.stride(0), n)
    return normalisers, ranks


def forbid_tokens(logits: Tensor, masks: MaskArray) -> None:
    """Make logits [S, vocabulary], float32 or bfloat16 and contiguous, minus infinity in place where `masks` [S, words]
    do not allow the token. Where that leaves nothing, the first allowed token becomes possible."""
    rows, n = logits.shape
    if library.supports(logits.dtype, logits.device):
        sizes = rows, logits.stride(0), n, masks.shape[1], library.DTYPE_CODES[logits.dtype]
        masks = np.ascontiguousarray(masks)
        library.bind_function("charonia_forbid_tokens")(logits.data_ptr(), masks.ctypes.data, *sizes)
    else:
        words = to_device(masks, logits.device).unsqueeze(-1)
        bits = words >> torch.arange(32, dtype=torch.int32, device=logits.device) & 1
        logits.masked_fill_(bits.view(rows, -1)[:, :n] == 0, -torch.inf)
    first = np.unpackbits(masks.view(np.uint8), axis=1, bitorder="little").argmax(1)
    at = torch.arange(rows, device=logits.device), to_device(first, logits.device)
    logits[at] = torch.where(logits.amax(-1) == -torch.inf, torch.zeros_like(logits[at]), logits[at])
