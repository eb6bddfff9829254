"""Attention on the CPU by torch alone: keys and values gathered block by block, then torch's flash attention.

Rows that compute one token are batched by length; longer chunks go one sequence at a time. The query heads that
share a key/value head are always spread over an axis of their own: SDPA's `enable_gqa` expands the keys. Behind a
window only the blocks that some token still sees are gathered.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import ClassVar, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ...scheduler.plan import IntArray
from ..checkpoint.model_spec import LayerAttention
from ..layers.step_context import StepAttention
from ..step_batch import StepBatch
from .backend import BackendSupport, CacheSpec, UnfusedStepAttention

MAX_PADDING_RATIO = 1.25
"""How much longer than its shortest row a batch of decoding rows may be padded."""


class TorchSdpaAttention:
    """A cache of keys and values by layer, and attention by `F.scaled_dot_product_attention`."""

    supports: ClassVar[BackendSupport] = BackendSupport(
        ("cpu",), (torch.bfloat16, torch.float16, torch.float32), range(1, 4097)
    )

    @classmethod
    def supports_heads(cls, spec: CacheSpec) -> bool:
        return True

    def __init__(self, spec: CacheSpec) -> None:
        self._spec = spec
        self._distinct, self._index = spec.distinct_attention, spec.attention_index
        self._layers: list[_LayerCache] = []

    @property
    def block_bytes(self) -> int:
        return self._spec.block_bytes

    def allocate(self, blocks: int) -> None:
        self._layers = [
            _LayerCache(_zeros(self._spec, blocks), _zeros(self._spec, blocks)) for _ in range(self._spec.layers)
        ]

    def begin_step(self, batch: StepBatch) -> StepAttention:
        slots = batch.slots()
        parts = [self._step_parts(batch, attention) for attention in self._distinct]
        token = (-1, self._spec.kv_heads * self._spec.head_dim)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
            cache = self._layers[layer]
            cache.keys.view(token).index_copy_(0, slots, k.reshape(token))
            cache.values.view(token).index_copy_(0, slots, v.reshape(token))
            out = torch.empty_like(q, memory_format=torch.contiguous_format)
            for part in parts[self._index[layer]]:
                part(cache, q, sinks, out)
            return out.view(len(q), -1)

        return UnfusedStepAttention(attend, self._spec.heads, self._spec.kv_heads)

    def _step_parts(self, batch: StepBatch, attention: LayerAttention) -> list["_AttentionPart"]:
        """The parts of a step in every layer with this `attention`."""
        return [*self._decode_parts(batch, attention), *self._chunk_parts(batch, attention)]

    def _decode_parts(self, batch: StepBatch, attention: LayerAttention) -> Iterator["_AttentionPart"]:
        """The rows of one token, in groups of nearly equal length."""
        single = np.flatnonzero(batch.counts == 1)
        skipped = self._skipped_blocks(batch.starts[single], attention)
        lengths = batch.starts[single] + 1 - skipped * self._spec.block_size
        for members in _group_by_length(lengths):
            rows = single[members]
            longest = int(lengths[members].max())
            yield _DecodeRows(
                self._spec,
                _attention_function(attention, causal=False),
                torch.from_numpy(batch.first_places[rows]),
                self._block_ids(batch, rows, skipped[members], longest),
                longest,
                self._padding_mask(lengths[members], longest, attention.window),
            )

    def _chunk_parts(self, batch: StepBatch, attention: LayerAttention) -> Iterator["_AttentionPart"]:
        """The rows of several tokens, each by itself."""
        skipped = self._skipped_blocks(batch.starts, attention)
        for row in np.flatnonzero(batch.counts > 1):
            start, count = int(batch.starts[row] - skipped[row] * self._spec.block_size), int(batch.counts[row])
            blocks = self._block_ids(batch, np.array([row]), skipped[[row]], start + count)
            tokens = slice(int(batch.first_places[row]), int(batch.first_places[row]) + count)
            mask = _causal_mask(start, count, attention, self._spec.dtype)
            yield _PrefillChunk(
                self._spec, _attention_function(attention, causal=mask is None), tokens, blocks, start + count, mask
            )

    def _skipped_blocks(self, starts: IntArray, attention: LayerAttention) -> NDArray[np.int64]:
        """The number of whole blocks that no token from `starts` on sees any more."""
        if attention.window is None:
            return np.zeros_like(starts)
        return np.maximum(starts + 1 - attention.window, 0) // self._spec.block_size

    def _block_ids(self, batch: StepBatch, rows: NDArray[np.int64], skipped: NDArray[np.int64], tokens: int) -> Tensor:
        """The ids [rows * blocks] of the blocks that hold each row's first `tokens` tokens after the skipped blocks."""
        blocks = np.arange(-(-tokens // self._spec.block_size)) + skipped[:, None]
        # A row shorter than its group may have no block there; the block that it gets instead is masked.
        places = np.minimum(blocks, batch.tables.shape[1] - 1)
        return batch.tables[torch.from_numpy(rows[:, None]), torch.from_numpy(places)].reshape(-1)

    def _padding_mask(self, lengths: NDArray[np.int64], longest: int, window: int | None) -> Tensor | None:
        """A mask [rows, 1, 1, longest] with minus infinity for tokens that a row does not see; None if all see all."""
        if int(lengths.min()) == longest and (window is None or longest <= window):
            return None
        ends, places = torch.from_numpy(lengths).unsqueeze(-1), torch.arange(longest)
        hidden = places >= ends if window is None else (places >= ends) | (places < ends - window)
        return _additive_mask(hidden, self._spec.dtype).view(len(lengths), 1, 1, longest)


class _LayerCache(NamedTuple):
    """Each [blocks, block_size * kv_heads * head_dim]: a block is contiguous."""

    keys: Tensor
    values: Tensor


_AttentionPart = Callable[[_LayerCache, Tensor, Tensor | None, Tensor], None]
"""(layer's cache, queries of all tokens, sinks, output of all tokens to fill in part)."""

_PartFunction = Callable[[Tensor, Tensor, Tensor, Tensor | None, Tensor | None], Tensor]
"""(queries [..., n, head_dim], keys, values [..., T, head_dim], mask, sinks [..., n or 1, 1]) -> [..., n, head_dim]."""


@dataclass(frozen=True, slots=True)
class _DecodeRows:
    """R rows that compute one token over at most `length` known ones; `tokens` [R] are its packed places."""

    spec: CacheSpec
    mix: _PartFunction
    tokens: Tensor
    blocks: Tensor
    length: int
    mask: Tensor | None

    def __call__(self, cache: _LayerCache, q: Tensor, sinks: Tensor | None, out: Tensor) -> None:
        spec, rows = self.spec, len(self.tokens)
        folded = q[self.tokens].view(rows, spec.kv_heads, -1, spec.head_dim)
        keys, values = (self._gather(part, rows) for part in cache)
        sunk = None if sinks is None else sinks.view(spec.kv_heads, -1, 1)
        mixed = self.mix(folded, keys, values, self.mask, sunk)
        out[self.tokens] = mixed.reshape(rows, spec.heads, spec.head_dim)

    def _gather(self, cache: Tensor, rows: int) -> Tensor:
        """[rows, kv_heads, length, head_dim]"""
        blocks = cache.index_select(0, self.blocks)
        return blocks.view(rows, -1, self.spec.kv_heads, self.spec.head_dim)[:, : self.length].transpose(1, 2)


@dataclass(frozen=True, slots=True)
class _PrefillChunk:
    """Several tokens of one sequence over `length` known ones; without a mask they are the sequence's first."""

    spec: CacheSpec
    mix: _PartFunction
    tokens: slice
    blocks: Tensor
    length: int
    mask: Tensor | None

    def __call__(self, cache: _LayerCache, q: Tensor, sinks: Tensor | None, out: Tensor) -> None:
        spec = self.spec
        shape = (-1, spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim)
        folded = q[self.tokens].view(shape).permute(1, 2, 0, 3)
        keys, values = (self._gather(part, folded.shape[1]) for part in cache)
        sunk = None if sinks is None else sinks.view(spec.kv_heads, -1, 1, 1)
        mixed = self.mix(folded, keys, values, self.mask, sunk)
        out[self.tokens].view(shape).copy_(mixed.permute(2, 0, 1, 3))

    def _gather(self, cache: Tensor, group: int) -> Tensor:
        """[kv_heads, group, length, head_dim], the same memory for every head of a group"""
        blocks = cache.index_select(0, self.blocks).view(-1, self.spec.kv_heads, 1, self.spec.head_dim)
        return blocks[: self.length].permute(1, 2, 0, 3).expand(-1, group, -1, -1)


def _group_by_length(lengths: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
    """Indices of `lengths`, in groups whose longest is at most MAX_PADDING_RATIO times (and a block or so above) the
    shortest."""
    order = np.argsort(lengths, kind="stable")
    ordered = lengths[order]
    begin = 0
    while begin < len(order):
        end = int(np.searchsorted(ordered, ordered[begin] * MAX_PADDING_RATIO + 16, side="right"))
        yield order[begin:end]
        begin = end


def _attention_function(attention: LayerAttention, causal: bool) -> _PartFunction:
    """The attention of a layer with this `attention`; `causal` hides later tokens where no mask does."""
    if not _sdpa_supports(attention):
        return partial(_explicit_attention, attention)
    return lambda q, k, v, mask, _: F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, scale=attention.scale
    )


def _sdpa_supports(attention: LayerAttention) -> bool:
    """Whether torch's kernels can compute it."""
    return attention.softcap is None and not attention.sinks


def _explicit_attention(
    attention: LayerAttention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, sinks: Tensor | None
) -> Tensor:
    scores = torch.matmul(q * (attention.scale or q.shape[-1] ** -0.5), k.transpose(-2, -1))
    if attention.softcap is not None:
        scores.div_(attention.softcap).tanh_().mul_(attention.softcap)
    if mask is not None:
        scores = scores + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)), -1)
    return torch.matmul(scores.softmax(-1)[..., : k.shape[-2]], v)


def _causal_mask(start: int, count: int, attention: LayerAttention, dtype: torch.dtype) -> Tensor | None:
    """A mask [count, start + count] with minus infinity where a token would see a later one, or one before its window.

    None from the start of a sequence, if torch's own causal mask does."""
    whole = start == 0 and (attention.window is None or count <= attention.window)
    if whole and _sdpa_supports(attention):
        return None
    back = torch.arange(start, start + count).unsqueeze(-1) - torch.arange(start + count)
    return _additive_mask(back < 0 if attention.window is None else (back < 0) | (back >= attention.window), dtype)


def _additive_mask(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf)


def _zeros(spec: CacheSpec, blocks: int) -> Tensor:
    """Zeros that take memory only when they are written to (numpy's come from calloc, torch's are written at once).

    They must be zeros, because padding is multiplied by a weight of 0, and 0 * NaN is NaN.
    """
    size = blocks * spec.block_size * spec.kv_heads * spec.head_dim
    raw = np.zeros(size * spec.dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(spec.dtype).view(blocks, -1)
