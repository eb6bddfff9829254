"""A fast CPU path in torch alone: keys and values gathered block by block, then torch's flash attention.

Rows that compute one token are batched by length; longer chunks go one sequence at a time. The query heads that
share a key/value head are always spread over an axis of their own: SDPA's `enable_gqa` expands the keys.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from .base import Attend, Batch, CacheSpec, Support

WASTE = 1.25
"""How much longer than its shortest row a batch of decoding rows may be padded."""


class CpuAttention:
    """Per layer keys and values [blocks, block_size * kv_heads * head_dim]: a block is one contiguous copy."""

    supports: ClassVar[Support] = Support(("cpu",), (torch.bfloat16, torch.float16, torch.float32), range(1, 4097))

    def __init__(self, spec: CacheSpec) -> None:
        self._spec = spec
        self._layers: list[_Layer] = []

    @property
    def block_bytes(self) -> int:
        return self._spec.block_bytes

    def allocate(self, blocks: int) -> None:
        self._layers = [
            _Layer(_zeros(self._spec, blocks), _zeros(self._spec, blocks)) for _ in range(self._spec.layers)
        ]

    def copy(self, moves: Tensor) -> None:
        for layer in self._layers:
            for cache in layer:
                cache[moves[:, 1]] = cache[moves[:, 0]]

    def begin(self, batch: Batch) -> Attend:
        slots = batch.slots(self._spec.block_size)
        parts = [*self._decoding(batch), *self._chunks(batch)]
        token = (-1, self._spec.kv_heads * self._spec.head_dim)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            cache = self._layers[layer]
            cache.keys.view(token).index_copy_(0, slots, k.reshape(token))
            cache.values.view(token).index_copy_(0, slots, v.reshape(token))
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            for part in parts:
                part(cache, q, out)
            return out.view(len(q), -1)

        return attend

    def _decoding(self, batch: Batch) -> Iterator["_Part"]:
        """Rows of one token, in groups of nearly equal length."""
        first = np.cumsum(batch.counts) - batch.counts
        single = np.flatnonzero(batch.counts == 1)
        lengths = batch.starts[single] + 1
        for members in _groups(lengths):
            rows = single[members]
            longest = int(lengths[members].max())
            yield _Decoding(
                self._spec,
                torch.from_numpy(first[rows]),
                self._blocks(batch, torch.from_numpy(rows), longest),
                longest,
                self._padding(lengths[members], longest),
            )

    def _chunks(self, batch: Batch) -> Iterator["_Part"]:
        """Rows of several tokens, each by itself."""
        first = np.cumsum(batch.counts) - batch.counts
        for row in np.flatnonzero(batch.counts > 1).tolist():
            start, count = int(batch.starts[row]), int(batch.counts[row])
            blocks = self._blocks(batch, torch.tensor([row]), start + count)
            tokens = slice(int(first[row]), int(first[row]) + count)
            yield _Chunk(self._spec, tokens, blocks, start + count, _causal(start, count, self._spec.dtype))

    def _blocks(self, batch: Batch, rows: Tensor, tokens: int) -> Tensor:
        """[rows * blocks] ids of the blocks that hold the first `tokens` tokens of each row."""
        return batch.tables[rows, : -(-tokens // self._spec.block_size)].reshape(-1)

    def _padding(self, lengths: NDArray[np.int64], longest: int) -> Tensor | None:
        """[rows, 1, 1, longest] minus infinity after each row's end; None where all are equally long."""
        if int(lengths.min()) == longest:
            return None
        after = torch.arange(longest) >= torch.from_numpy(lengths).unsqueeze(-1)
        return _masked(after, self._spec.dtype).view(len(lengths), 1, 1, longest)


class _Layer(NamedTuple):
    keys: Tensor
    values: Tensor


_Part = Callable[[_Layer, Tensor, Tensor], None]
"""(layer's cache, queries of all tokens, output of all tokens to fill in part)."""


@dataclass(frozen=True, slots=True)
class _Decoding:
    """R rows of one token over at most `length` known ones; `tokens` [R] are their places in the packed batch."""

    spec: CacheSpec
    tokens: Tensor
    blocks: Tensor
    length: int
    mask: Tensor | None

    def __call__(self, cache: _Layer, q: Tensor, out: Tensor) -> None:
        spec, rows = self.spec, len(self.tokens)
        folded = q[self.tokens].view(rows, spec.kv_heads, -1, spec.head_dim)
        keys, values = (self._gather(part, rows) for part in cache)
        mixed = F.scaled_dot_product_attention(folded, keys, values, attn_mask=self.mask)
        out[self.tokens] = mixed.reshape(rows, spec.heads, spec.head_dim)

    def _gather(self, cache: Tensor, rows: int) -> Tensor:
        """[rows, kv_heads, length, head_dim]"""
        blocks = cache.index_select(0, self.blocks)
        return blocks.view(rows, -1, self.spec.kv_heads, self.spec.head_dim)[:, : self.length].transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Several tokens of one sequence over `length` known ones; without a mask they are the first of it."""

    spec: CacheSpec
    tokens: slice
    blocks: Tensor
    length: int
    mask: Tensor | None

    def __call__(self, cache: _Layer, q: Tensor, out: Tensor) -> None:
        spec = self.spec
        shape = (-1, spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim)
        folded = q[self.tokens].view(shape).permute(1, 2, 0, 3)
        keys, values = (self._gather(part, folded.shape[1]) for part in cache)
        mixed = F.scaled_dot_product_attention(folded, keys, values, self.mask, is_causal=self.mask is None)
        out[self.tokens].view(shape).copy_(mixed.permute(2, 0, 1, 3))

    def _gather(self, cache: Tensor, group: int) -> Tensor:
        """[kv_heads, group, length, head_dim], the same memory for every head of a group"""
        blocks = cache.index_select(0, self.blocks).view(-1, self.spec.kv_heads, 1, self.spec.head_dim)
        return blocks[: self.length].permute(1, 2, 0, 3).expand(-1, group, -1, -1)


def _groups(lengths: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Indices of `lengths`, in groups whose longest is at most WASTE times (and a block or so above) the shortest."""
    order = np.argsort(lengths, kind="stable")
    ordered = lengths[order]
    begin = 0
    while begin < len(order):
        end = int(np.searchsorted(ordered, ordered[begin] * WASTE + 16, side="right"))
        yield order[begin:end]
        begin = end


def _causal(start: int, count: int, dtype: torch.dtype) -> Tensor | None:
    """[count, start + count] minus infinity where a token would see a later one; None from the start of a sequence."""
    if start == 0:
        return None
    future = torch.arange(start + count) > torch.arange(start, start + count).unsqueeze(-1)
    return _masked(future, dtype)


def _masked(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf)


def _zeros(spec: CacheSpec, blocks: int) -> Tensor:
    """Zeros that take memory only when they are written to (numpy's come from calloc, torch's are written at once).

    Zeros and not just any bytes, because padding is multiplied with a weight of 0, and 0 * NaN is NaN.
    """
    size = blocks * spec.block_size * spec.kv_heads * spec.head_dim
    raw = np.zeros(size * spec.dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(spec.dtype).view(blocks, -1)
