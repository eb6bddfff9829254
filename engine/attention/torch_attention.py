"""Attention in plain torch: by its formula on any device, the oracle of every other backend; on the CPU by torch's
flash attention over keys and values gathered block by block: rows with one token are batched by length, longer chunks
go one by one, and behind a window only blocks that some token still sees are gathered."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from ...scheduler.plan import IntArray
from ..checkpoint.model_spec import KeyValueShape, LayerAttention
from ..layers.norm import QKNorm
from ..layers.rotary import RotaryAngles
from ..layers.step_context import StepAttention
from ..step_batch import StepBatch
from .backend import AttentionBackend, BackendSupport, CacheSpec

AttentionFunction: TypeAlias = Callable[[int, Tensor, Tensor | None, Tensor | None, Tensor | None], Tensor]
"""The arguments and result of `StepAttention.__call__`."""


class TorchStepAttention:
    """A `StepAttention` by a function that expects rotated queries and keys."""

    def __init__(self, attend: AttentionFunction, spec: CacheSpec) -> None:
        self._attend = attend
        self._heads = spec.heads
        self._shapes = spec.shapes

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        return self._attend(layer, q, k, v, sinks)

    def apply_rope_and_attend(
        self, layer: int, packed: Tensor, angles: RotaryAngles, sinks: Tensor | None = None, norm: QKNorm | None = None
    ) -> Tensor:
        if norm is not None:
            norm(packed)
        shape = self._shapes[layer]
        if shape.values_in_keys:
            rotated = angles.rotate(packed[..., shape.value_size :].contiguous())
            packed = torch.cat((packed[..., : shape.value_size], rotated), -1)
            return self._attend(layer, packed[:, : self._heads], packed[:, self._heads :], None, sinks)
        if packed.shape[1] == self._heads:
            return self._attend(layer, angles.rotate(packed), None, None, sinks)
        rotated_heads = self._heads + shape.heads
        rotated = angles.rotate(packed[:, :rotated_heads])
        values = packed[:, rotated_heads:]
        return self._attend(layer, rotated[:, : self._heads], rotated[:, self._heads :], values, sinks)


class StoredTokens(TorchStepAttention):
    """The attention of one step, and the keys by row: what models that attend by themselves keep of a token."""

    def __init__(
        self,
        attend: AttentionFunction,
        spec: CacheSpec,
        keys: Sequence[Tensor],
        known: Sequence[Sequence[Tensor]],
        starts: Sequence[int],
    ) -> None:
        """`keys`: of each layer. `known`: of each layer and row the slots of all the row's tokens after the step, of
        which the first `starts` are computed."""
        super().__init__(attend, spec)
        self._keys = keys
        self._known = known
        self._starts = starts

    def read(self, layer: int, row: int) -> Tensor:
        """The keys [tokens, heads, key size] that earlier steps kept of a row."""
        return self._keys[layer][self._known[layer][row][: self._starts[row]]]

    def write(self, layer: int, row: int, keys: Tensor) -> None:
        """Keep those of the step's own tokens, of the same shape."""
        self._keys[layer][self._known[layer][row][self._starts[row] :]] = keys


class ReferenceAttention(AttentionBackend):
    """Strips [slots, numbers], of which a layer's keys and values are views [slots, kv_heads, size]; scores and sums in
    float32, one sequence at a time. Its steps are `StoredTokens`."""

    supports: ClassVar[BackendSupport] = AttentionBackend.supports._replace(devices=("cpu", "cuda"))
    adds_by_distance: ClassVar[bool] = True

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self._cache: list[Tensor] = []
        self._layers: list[tuple[Tensor, Tensor]] = []

    def allocate(self, blocks: int) -> None:
        spec = self._spec
        self._layers, self._cache = [], []  # earlier ones are freed first
        widths, layers = spec.strips([shape.numbers for shape in spec.shapes])
        lines = blocks * spec.block_size
        self._cache = [torch.zeros(lines, width, dtype=spec.dtype, device=spec.device) for width in widths]
        for shape, (strip, begin) in zip(spec.shapes, layers, strict=True):
            middle = begin + shape.heads * shape.key_size
            keys = self._cache[strip][:, begin:middle].view(lines, shape.heads, shape.key_size)
            values = keys[..., : shape.value_size]
            if not shape.values_in_keys:
                values = self._cache[strip][:, middle : begin + shape.numbers].view(values.shape)
            self._layers.append((keys, values))

    @property
    def device_blocks(self) -> Sequence[Tensor]:
        return [strip.view(-1, self._spec.block_size, strip.shape[1]) for strip in self._cache]

    def store(self, batch: StepBatch, layer: int, keys: Tensor, values: Tensor) -> None:
        slots = batch.of_group(self._layer_places[layer].group).slots()
        for cache, new in zip(self._layers[layer], (keys, values), strict=True):
            cache[slots] = new

    def begin_step(self, batch: StepBatch) -> StepAttention:
        counts = batch.counts.tolist()
        starts = batch.starts.tolist()
        ends_of: Sequence[Tensor | None] = [None] * len(counts)
        if batch.moved is not None and batch.moved.ends is not None:
            ends_of = torch.split(torch.from_numpy(batch.moved.ends).to(self._spec.device), counts)
        groups = sorted({place.group for place in self._layer_places})
        slots_of = {group: batch.of_group(group).slots() for group in groups}
        known_of = {group: self._known_slots(batch.of_group(group)) for group in groups}

        def attend(layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None) -> Tensor:
            keys, values = self._layers[layer]
            group = self._layer_places[layer].group
            slots, known = slots_of[group], known_of[group]
            if k is not None:
                keys[slots] = k
            if v is not None:
                values[slots] = v
            rows = zip(torch.split(q, counts), known, starts, ends_of, strict=True)
            kind = self._spec.attention[layer]
            mixed = [
                reference_attention(own, keys[at], values[at], start, kind, sinks, ends)
                for own, at, start, ends in rows
            ]
            return torch.cat(mixed)

        known_by_layer = [known_of[place.group] for place in self._layer_places]
        return StoredTokens(attend, self._spec, [keys for keys, _ in self._layers], known_by_layer, starts)

    def _known_slots(self, batch: StepBatch) -> list[Tensor]:
        """The slots of the tokens of each row, those of the step included."""
        size = self._spec.block_size
        known = []
        for row, length in enumerate((batch.starts + batch.counts).tolist()):
            positions = torch.arange(length, device=self._spec.device)
            known.append(batch.tables[row, positions // size] * size + positions % size)
        return known


def reference_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: int,
    attention: LayerAttention,
    sinks: Tensor | None = None,
    ends: Tensor | None = None,
) -> Tensor:
    """Causal grouped-query attention of one sequence: q [n, heads, d] at positions from `start`, k [T, kv_heads, d] and
    v [T, kv_heads, e] at positions from 0; [n, heads * e] in q's dtype. `ends`: as of `StepPositions`. (arXiv
    1706.03762, 2305.13245; the window 2310.06825, the cap 2408.00118, the sinks 2508.10925.)"""
    count, heads, head_dim = q.shape
    group = heads // k.shape[1]
    keys, values = (part.float().repeat_interleave(group, 1) for part in (k, v))
    scores = torch.einsum("nhd,thd->hnt", q.float(), keys) * (attention.scale or head_dim**-0.5)
    places = torch.arange(len(k), device=q.device)
    back = torch.arange(start, start + count, device=q.device).unsqueeze(-1) - places
    if attention.distances and sinks is not None:
        scores, sinks = scores + sinks[:, back.clamp(0, attention.distances - 1)], None
    if attention.softcap is not None:
        scores = attention.softcap * torch.tanh(scores / attention.softcap)
    hidden = back < 0 if ends is None or not attention.both_ways else places >= ends.unsqueeze(-1)
    if attention.window is not None:
        hidden = hidden | (back >= attention.window)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(heads, 1, 1).expand(heads, count, 1)), -1)
    return torch.einsum("hnt,thd->nhd", scores.softmax(-1)[..., : len(k)], values).to(q.dtype).flatten(1)


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


class TorchSdpaAttention(AttentionBackend):
    """Strips [slots, numbers] of keys, and as many of values where keys do not have them; attention by
    `F.scaled_dot_product_attention`. The query heads that share a key/value head are spread over an axis of their own:
    its `enable_gqa` would expand the keys."""

    @classmethod
    def supports_shape(cls, shape: KeyValueShape, heads: int) -> bool:
        return shape.values_in_keys or shape.value_size == shape.key_size

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self._distinct = spec.distinct_attention
        self._index = spec.attention_index
        self._cache: list[Tensor] = []
        self._layers: list[tuple[Tensor, Tensor]] = []

    def allocate(self, blocks: int) -> None:
        spec = self._spec
        self._layers, self._cache = [], []  # earlier ones are freed first
        keys = self._allocate(blocks, [shape.heads * shape.key_size for shape in spec.shapes])
        values = self._allocate(blocks, [shape.numbers - shape.heads * shape.key_size for shape in spec.shapes])
        self._layers = [(own, apart if apart.shape[1] else own) for own, apart in zip(keys, values, strict=True)]

    def _allocate(self, blocks: int, sizes: list[int]) -> list[Tensor]:
        """Views [slots, numbers] of strips for layers that keep so many numbers of a token: zeros, which take memory
        only when they are written to (numpy's come from calloc, torch's are written at once). They must be numbers,
        because padding is multiplied by a weight of 0, and 0 * NaN is NaN."""
        spec = self._spec
        widths, layers = spec.strips(sizes)
        lines = [(blocks * spec.block_size, max(width, 1) * spec.dtype.itemsize) for width in widths]
        strips = [torch.from_numpy(np.zeros(line, np.uint8)).view(spec.dtype) for line in lines]
        self._cache += [strip for strip, width in zip(strips, widths, strict=True) if width]
        return [strips[strip][:, begin : begin + size] for (strip, begin), size in zip(layers, sizes, strict=True)]

    @property
    def device_blocks(self) -> Sequence[Tensor]:
        return [strip.view(-1, self._spec.block_size, strip.shape[1]) for strip in self._cache]

    def store(self, batch: StepBatch, layer: int, keys: Tensor, values: Tensor) -> None:
        slots = batch.of_group(self._layer_places[layer].group).slots()
        self._keep(layer, slots, self._begun(slots), keys, values)

    def _begun(self, slots: Tensor) -> Tensor:
        """The blocks whose first places are among these."""
        return slots[slots % self._spec.block_size == 0] // self._spec.block_size

    def _keep(self, layer: int, slots: Tensor, begun: Tensor, k: Tensor | None, v: Tensor | None) -> None:
        for cache, new in zip(self._layers[layer], (k, v), strict=True):
            if new is None:
                continue
            if len(begun):  # blocks with what an earlier sequence left there
                self._in_blocks(cache).index_fill_(0, begun, 0)
            cache.index_copy_(0, slots, new.reshape(len(new), -1))

    def _in_blocks(self, cache: Tensor) -> Tensor:
        """[blocks, block_size, numbers] of one layer's keys or values."""
        return cache.view(-1, self._spec.block_size, cache.shape[1])

    def begin_step(self, batch: StepBatch) -> StepAttention:
        spec = self._spec
        places = self._layer_places
        groups = {place.group: batch.of_group(place.group) for place in places}
        slots_of = {group: own.slots() for group, own in groups.items()}
        begun_of = {group: self._begun(slots) for group, slots in slots_of.items()}
        kinds = {(place.group, index) for place, index in zip(places, self._index, strict=True)}
        parts = {(group, index): self._parts(groups[group], self._distinct[index]) for group, index in kinds}

        def attend(layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None) -> Tensor:
            kv_heads, size, value_size, _ = spec.shapes[layer]
            group = places[layer].group
            slots, begun = slots_of[group], begun_of[group]
            grouped = (-1, kv_heads, spec.heads // kv_heads, size)
            self._keep(layer, slots, begun, k, v)
            out = q.new_empty(len(q), kv_heads, spec.heads // kv_heads, value_size)
            for part in parts[group, self._index[layer]]:
                mixed = self._attend(part, layer, q.view(grouped)[part.tokens], sinks)
                out[part.tokens] = mixed[..., :value_size]
            return out.view(len(q), -1)

        return TorchStepAttention(attend, spec)

    def _attend(self, part: _AttentionPart, layer: int, queries: Tensor, sinks: Tensor | None) -> Tensor:
        """Attention of a part's queries, [tokens, kv_heads, group, head_dim] like the result. Where values are in keys,
        whole keys are mixed: torch's flash attention wants both of one size."""
        _, kv_heads, group, head_dim = queries.shape
        rows = 1 if part.chunk else len(queries)

        def gathered(cache: Tensor) -> Tensor:
            by_row = self._in_blocks(cache).index_select(0, part.blocks).view(rows, -1, kv_heads, head_dim)
            return by_row[:, : part.length].transpose(1, 2)

        stored_keys, stored_values = self._layers[layer]
        keys = gathered(stored_keys)
        values = keys if stored_values is stored_keys else gathered(stored_values)
        sunk = None if sinks is None else sinks.view(kv_heads, group, 1)
        if not part.chunk:
            return _mix(part, queries, keys, values, sunk)
        # The same memory for every head of a group.
        keys, values = (entries.transpose(0, 1).expand(-1, group, -1, -1) for entries in (keys, values))
        mixed = _mix(part, queries.permute(1, 2, 0, 3), keys, values, None if sunk is None else sunk.unsqueeze(-1))
        return mixed.permute(2, 0, 1, 3)

    def _parts(self, batch: StepBatch, kind: LayerAttention) -> list[_AttentionPart]:
        return [*self._decode_parts(batch, kind), *self._chunk_parts(batch, kind)]

    def _decode_parts(self, batch: StepBatch, attention: LayerAttention) -> Iterator[_AttentionPart]:
        """The rows of one token, in groups of nearly equal length."""
        single = np.flatnonzero(batch.counts == 1)
        window = attention.window
        skipped = self._skipped_blocks(batch.starts[single], window)
        lengths = batch.starts[single] + 1 - skipped * self._spec.block_size
        for members in _group_by_length(lengths):
            rows = single[members]
            longest = int(lengths[members].max())
            mask = None
            if int(lengths[members].min()) < longest or (window is not None and longest > window):
                ends = torch.from_numpy(lengths[members])
                mask = _additive_mask(ends, longest, window, self._spec.dtype).view(-1, 1, 1, longest)
            blocks = self._block_ids(batch, rows, skipped[members], longest)
            yield _AttentionPart(attention, torch.from_numpy(batch.first_places[rows]), blocks, longest, mask, False)

    def _chunk_parts(self, batch: StepBatch, attention: LayerAttention) -> Iterator[_AttentionPart]:
        skipped = self._skipped_blocks(batch.starts, attention.window)
        window = attention.window
        for row in np.flatnonzero(batch.counts > 1):
            start = int(batch.starts[row] - skipped[row] * self._spec.block_size)
            count = int(batch.counts[row])
            first = int(batch.first_places[row])
            length = start + count
            mask = seen = None
            if attention.both_ways and batch.moved is not None and batch.moved.ends is not None:
                ends = batch.moved.ends[first : first + count] - skipped[row] * self._spec.block_size
                seen = torch.from_numpy(ends)
            if start or not _sdpa_supports(attention) or (window is not None and count > window) or seen is not None:
                mask = _additive_mask(torch.arange(start + 1, length + 1), length, window, self._spec.dtype, seen)
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
        # A row shorter than its group gets its own last block, masked; in others' may be no number, and 0 * NaN is NaN.
        places = np.minimum(blocks, (batch.starts[rows] + batch.counts[rows] - 1)[:, None] // self._spec.block_size)
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
    attention = part.attention
    mask = part.mask
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


def _additive_mask(
    ends: Tensor, length: int, window: int | None, dtype: torch.dtype, seen: Tensor | None = None
) -> Tensor:
    """[len(ends), length]: minus infinity for tokens from each of `ends` on, or of those that are `seen` to, and before
    the window that ends there."""
    places = torch.arange(length)
    hidden = places >= (ends if seen is None else seen).unsqueeze(-1)
    if window is not None:
        hidden |= places < ends.unsqueeze(-1) - window
    return torch.zeros(hidden.shape, dtype=dtype).masked_fill_(hidden, -math.inf)
