"""Small unsigned integers packed into 32-bit words, the first in the lowest bits."""

import torch
import torch.nn.functional as F
from torch import Tensor

WORD_BITS = 32


def words_for(count: int, bits: int) -> int:
    """The words that hold `count` numbers one behind the other, some of them across two words."""
    return -(-count * bits // WORD_BITS)


def unpack_words(words: Tensor, bits: int, count: int) -> Tensor:
    """int32 [n, words] -> uint8 [n, count], numbers of 1 to 8 bits."""
    octets = words.contiguous().view(torch.uint8)
    if bits == 8:
        return octets[:, :count]
    if 8 % bits == 0:
        parts = [octets >> at & ((1 << bits) - 1) for at in range(0, 8, bits)]
        return torch.stack(parts, -1).flatten(1)[:, :count]
    first = torch.arange(count) * bits
    wide = F.pad(octets, (0, 1)).to(torch.int32)
    both = wide[:, first // 8] | wide[:, first // 8 + 1] << 8
    return (both >> (first % 8).to(torch.int32) & ((1 << bits) - 1)).to(torch.uint8)
