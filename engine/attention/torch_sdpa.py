"""Attention on the CPU by torch alone: keys and values gathered block by block, then torch's flash attention.

Rows that compute one token are batched by length; longer chunks go one sequence at a time. The query heads that
share a key/value head are always spread over an axis of their own: SDPA's `enable_gqa` expands the keys. Behind a
window only the blocks that some token still sees are gathered.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ...scheduler.plan import IntArray
from ..checkpoint.model_spec import LayerAttention
from ..layers.step_context import StepAttention
from ..step_batch import StepBatch
from .backend import CacheSpec, TorchBackend, TorchStepAttention

MAX_PADDING_RATIO = 1.25
"""How much longer than its shortest row a batch of decoding rows may be padded."""


class _AttentionPart(NamedTuple):
    """Tokens that attend together, over at most `length` known ones: a `chunk` of one sequence, or single tokens of R
    rows. `tokens` are their packed places, `blocks` the ids [R * blocks] of the blocks that each row attends to.
    Without a mask, [tokens, length] or [R, 1, 1, length], a chunk begins its sequence and single tokens see all."""

    attention: LayerAttention
    tokens: Tensor | slice
    blocks: Tensor
    length: int
    mask: Tensor | None
    chunk: bool


class TorchSdpaAttention(TorchBackend):
    """Keys and values of each layer, each [blocks, block_size * kv_heads * head_dim], and attention by
    `F.scaled_dot_product_attention`."""

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self._distinct, self._index = spec.distinct_attention, spec.attention_index
        self._layers: list[tuple[Tensor, Tensor]] = []

    def allocate(self, blocks: int) -> None:
        self._layers = [(_zeros(self._spec, blocks), _zeros(self._spec, blocks)) for _ in range(self._spec.layers)]

    def begin_step(self, batch: StepBatch) -> StepAttention:
        slots, spec = batch.slots(), self._spec
        parts = [[*self._decode_parts(batch, each), *self._chunk_parts(batch, each)] for each in self._distinct]
        token = (-1, spec.kv_heads * spec.head_dim)
        grouped = (-1, spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
            for cache, new in zip(self._layers[layer], (k, v), strict=True):
                cache.view(token).index_copy_(0, slots, new.reshape(token))
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            for part in parts[self._index[layer]]:
                out.view(grouped)[part.tokens] = self._attend(part, layer, q.view(grouped)[part.tokens], sinks)
            return out.view(len(q), -1)

        return TorchStepAttention(attend, spec)

    def _attend(self, part: _AttentionPart, layer: int, queries: Tensor, sinks: Tensor | None) -> Tensor:
        """Attention of a part's queries, [tokens, kv_heads, group, head_dim] like the result."""
        _, kv_heads, group, head_dim = queries.shape
        rows = 1 if part.chunk else len(queries)
        gathered = (cache.index_select(0, part.blocks) for cache in self._layers[layer])
        by_row = (each.view(rows, -1, kv_heads, head_dim) for each in gathered)
        keys, values = (each[:, : part.length].transpose(1, 2) for each in by_row)
        sunk = None if sinks is None else sinks.view(kv_heads, group, 1)
        if not part.chunk:
            return _mix(part, queries, keys, values, sunk)
        # The same memory for every head of a group.
        keys, values = (each.transpose(0, 1).expand(-1, group, -1, -1) for each in (keys, values))
        mixed = _mix(part, queries.permute(1, 2, 0, 3), keys, values, None if sunk is None else sunk.unsqueeze(-1))
        return mixed.permute(2, 0, 1, 3)

    def _decode_parts(self, batch: StepBatch, attention: LayerAttention) -> Iterator[_AttentionPart]:
        """The rows of one token, in groups of nearly equal length."""
        single, window = np.flatnonzero(batch.counts == 1), attention.window
        skipped = self._skipped_blocks(batch.starts[single], window)
        lengths = batch.starts[single] + 1 - skipped * self._spec.block_size
        for members in _group_by_length(lengths):
            rows, longest = single[members], int(lengths[members].max())
            mask = None
            if int(lengths[members].min()) < longest or (window is not None and longest > window):
                ends = torch.from_numpy(lengths[members])
                mask = _additive_mask(ends, longest, window, self._spec.dtype).view(-1, 1, 1, longest)
            blocks = self._block_ids(batch, rows, skipped[members], longest)
            yield _AttentionPart(attention, torch.from_numpy(batch.first_places[rows]), blocks, longest, mask, False)

    def _chunk_parts(self, batch: StepBatch, attention: LayerAttention) -> Iterator[_AttentionPart]:
        skipped, window = self._skipped_blocks(batch.starts, attention.window), attention.window
        for row in np.flatnonzero(batch.counts > 1):
            start, count = int(batch.starts[row] - skipped[row] * self._spec.block_size), int(batch.counts[row])
            first, length, mask = int(batch.first_places[row]), start + count, None
            if start or not _sdpa_supports(attention) or (window is not None and count > window):
                mask = _additive_mask(torch.arange(start + 1, length + 1), length, window, self._spec.dtype)
            blocks = self._block_ids(batch, np.array([row]), skipped[[row]], length)
            yield _AttentionPart(attention, slice(first, first + count), blocks, length, mask, True)

    def _skipped_blocks(self, starts: IntArray, window: int | None) -> NDArray[np.int64]:
        """The number of whole blocks that no token from `starts` on sees any more."""
        if window is None:
            return np.zeros_like(starts)
        return np.maximum(starts + 1 - window, 0) // self._spec.block_size

    def _block_ids(self, batch: StepBatch, rows: NDArray[np.int64], skipped: NDArray[np.int64], tokens: int) -> Tensor:
        """The ids [rows * blocks] of the blocks that hold each row's first `tokens` tokens after the skipped blocks."""
        blocks = np.arange(-(-tokens // self._spec.block_size)) + skipped[:, None]
        # A row shorter than its group may have no block there; the block that it gets instead is masked.
        places = np.minimum(blocks, batch.tables.shape[1] - 1)
        return batch.tables[torch.from_numpy(rows[:, None]), torch.from_numpy(places)].reshape(-1)


def _group_by_length(lengths: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Indices of `lengths`, in groups whose longest is at most MAX_PADDING_RATIO times the shortest, and 16 more."""
    order = np.argsort(lengths, kind="stable")
    ordered = lengths[order]
    begin = 0
    while begin < len(order):
        end = int(np.searchsorted(ordered, ordered[begin] * MAX_PADDING_RATIO + 16, side="right"))
        yield order[begin:end]
        begin = end


def _sdpa_supports(attention: LayerAttention) -> bool:
    return attention.softcap is None and not attention.sinks


def _mix(part: _AttentionPart, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
    """Queries [..., n, head_dim], keys and values [..., T, head_dim], sinks [..., n or 1, 1] -> [..., n, head_dim]."""
    attention, mask = part.attention, part.mask
    if _sdpa_supports(attention):
        causal = part.chunk and mask is None
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=attention.scale)
    scores = torch.matmul(q * (attention.scale or q.shape[-1] ** -0.5), k.transpose(-2, -1))
    if attention.softcap is not None:
        scores.div_(attention.softcap).tanh_().mul_(attention.softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), -1)
    return torch.matmul(scores.softmax(-1)[..., : k.shape[-2]], v)


def _additive_mask(ends: Tensor, length: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """[len(ends), length]: minus infinity for tokens from each of `ends` on, and before the window that ends there."""
    places, ends = torch.arange(length), ends.unsqueeze(-1)
    hidden = places >= ends if window is None else (places >= ends) | (places < ends - window)
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf)


def _zeros(spec: CacheSpec, blocks: int) -> Tensor:
    """Zeros that take memory only when they are written to (numpy's come from calloc, torch's are written at once).
    They must be zeros, because padding is multiplied by a weight of 0, and 0 * NaN is NaN."""
    size = blocks * spec.block_size * spec.kv_heads * spec.head_dim
    raw = np.zeros(size * spec.dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(spec.dtype).view(blocks, -1)
