"""Attention by Triton kernels on a GPU: decoding rows in one launch, chunks of prompts in another, whatever is mixed in
a step. What a token gets depends on the tokens before it alone, to the bit, and not on which of the two computes it."""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..checkpoint.model_spec import KeyValueShape
from ..gpu.attention_plan import DECODE_PLACES, AttentionSpec, CacheShape, LayerCache, StepTiles, plan_tiles
from ..layers.norm import QKNorm
from ..layers.rotary import RotaryAngles, TorchAngles
from ..step_batch import StepBatch
from .backend import AttentionBackend, BackendSupport, CacheSpec, heads_side_by_side

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""What the numbers of a cache are kept as, by `CacheSpec.kv_cache_dtype`, rounded once, when they are written. Either
has a scale for each token and head, after its largest magnitude (float32): nothing is calibrated, and nothing is out of
range. Of numbers above a fourteenth of that largest one int8 keeps more than fp8 (e4m3), of smaller ones fp8."""


class TritonAttention(AttentionBackend):
    """Strips [keys and values, blocks, numbers], in which a layer's part of a block is [kv_heads, block_size,
    head_dim]; of codes also strips of `LayerCache.scales`, [blocks, lines, keys and values]."""

    supports: ClassVar[BackendSupport] = AttentionBackend.supports._replace(
        devices=("cpu", "cuda"), kv_cache_dtypes=("auto", *CODES)
    )

    @classmethod
    def supports_shape(cls, shape: KeyValueShape, heads: int) -> bool:
        if shape.values_in_keys or shape.value_size != shape.key_size:
            return False
        return 16 <= shape.key_size <= 512 and heads // shape.heads <= 64

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self._codes = CODES.get(spec.kv_cache_dtype)
        lines = [shape.heads * spec.block_size for shape in spec.shapes]
        sizes = [own * shape.key_size for own, shape in zip(lines, spec.shapes, strict=True)]
        self._numbers = spec.strips(sizes)
        line_sizes = [1] * len(self._numbers.widths)  # of a strip that is whole lines of any of its layers
        for (strip, _), shape in zip(self._numbers.layers, spec.shapes, strict=True):
            line_sizes[strip] = math.lcm(line_sizes[strip], shape.key_size)
        for strip, size in enumerate(line_sizes):
            self._numbers.widths[strip] += -self._numbers.widths[strip] % size
        self._scales = spec.strips(lines)
        self._index = spec.attention_index
        self._specs = [self._attention_spec(spec.attention_index.index(kind)) for kind in range(len(set(self._index)))]
        self._groups = [place.group for place in self._layer_places]
        self._layers: list[LayerCache] = []
        self._blocks: list[Tensor] = []

    def _attention_spec(self, layer: int) -> AttentionSpec:
        spec = self._spec
        kind = spec.attention[layer]
        heads, size, *_ = spec.kept(kind)
        block = self._numbers.widths[self._numbers.layers[layer][0]] // size
        scales = self._scales.widths[self._scales.layers[layer][0]]
        shape = CacheShape(spec.heads, heads, size, spec.block_size, self._codes, block, scales)
        return AttentionSpec(shape, kind.scale or size**-0.5, kind.window or 0, kind.softcap or 0.0, kind.both_ways)

    @property
    def block_bytes(self) -> int:
        numbers = 2 * sum(self._numbers.widths)
        if self._codes is None:
            return numbers * self._spec.dtype.itemsize
        return numbers + 2 * sum(self._scales.widths) * torch.float32.itemsize

    @property
    def recordable_places(self) -> int:
        return min((spec.most_decoded for spec in self._specs), default=DECODE_PLACES[-1])

    @property
    def records_prompts(self) -> bool:
        return True

    def allocate(self, blocks: int) -> None:
        spec = self._spec
        # Earlier ones are freed first.
        self._layers = []
        self._blocks = []
        # Zeros: a head that drafts attends to places that it never wrote, where memory may hold what is no number.
        numbers, scales = dict[int, Tensor](), dict[int, Tensor]()
        for width, strips in self._numbers.by_width.items():
            sizes = len(strips), 2, blocks, width
            cache = torch.zeros(sizes, dtype=self._codes or spec.dtype, device=spec.device)
            self._blocks.append(cache.movedim(2, 0))
            numbers |= dict(zip(strips, cache, strict=True))
        if self._codes is not None:
            for width, strips in self._scales.by_width.items():
                cache = torch.zeros((len(strips), blocks, width, 2), device=spec.device)
                self._blocks.append(cache.movedim(1, 0))
                scales |= dict(zip(strips, cache, strict=True))
        for (strip, begin), (own, first) in zip(self._numbers.layers, self._scales.layers, strict=True):
            keys, values = numbers[strip][..., begin:]
            self._layers.append(LayerCache(keys, values, scales[own][:, first:] if scales else None))

    @property
    def device_blocks(self) -> Sequence[Tensor]:
        return self._blocks

    def store(self, batch: StepBatch, layer: int, keys: Tensor, values: Tensor) -> None:
        from ..gpu.cache_write import write_cache

        shape = self._specs[self._index[layer]].shape
        places = batch.of_group(self._groups[layer]).on_device
        stored = heads_side_by_side(keys), heads_side_by_side(values)
        write_cache(shape, self._layers[layer], places, batch.owners, (stored[0], *stored), None)

    def begin_step(self, batch: StepBatch) -> "TritonStepAttention":
        tiles = [plan_tiles(spec, batch) for spec in self._specs]
        return TritonStepAttention(batch, self._specs, tiles, self._index, self._layers, self._groups)


class TritonStepAttention:
    """One step's attention; see `StepAttention`."""

    def __init__(
        self,
        batch: StepBatch,
        specs: list[AttentionSpec],
        tiles: list[StepTiles],
        index: list[int],
        layers: list[LayerCache],
        groups: list[int],
    ) -> None:
        self._batch = batch
        self._specs = specs
        self._tiles = tiles
        self._index = index
        self._layers = layers
        self._groups = groups

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        stored = None if k is None or v is None else (heads_side_by_side(k), heads_side_by_side(v))
        return self._attend(layer, heads_side_by_side(q), stored, sinks, None)

    def apply_rope_and_attend(
        self, layer: int, packed: Tensor, angles: RotaryAngles, sinks: Tensor | None = None, norm: QKNorm | None = None
    ) -> Tensor:
        assert isinstance(angles, TorchAngles), "the C kernels' angles are for the CPU"
        shape = self._specs[self._index[layer]].shape
        if packed.shape[1] == shape.heads:
            return self._attend(layer, packed, None, sinks, angles, norm)
        q, k, v = torch.split(packed, [shape.heads, shape.kv_heads, shape.kv_heads], 1)
        return self._attend(layer, q, (k, v), sinks, angles, norm)

    def _attend(
        self,
        layer: int,
        q: Tensor,
        stored: tuple[Tensor, Tensor] | None,
        sinks: Tensor | None,
        rotation: TorchAngles | None,
        norm: QKNorm | None = None,
    ) -> Tensor:
        from ..gpu.attention import attend
        from ..gpu.cache_write import rotate_queries, write_cache
        from ..gpu.norm import TritonNorm

        at = self._index[layer]
        batch = self._batch.of_group(self._groups[layer]).on_device
        spec = self._specs[at]
        cache = self._layers[layer]
        place = spec.shape, cache, batch, self._batch.owners
        normed = None
        if norm is not None:
            assert isinstance(norm.norm, TritonNorm), "kernels normalise what they attend to"
            normed = norm.norm, norm.heads
        if stored is not None:
            q = write_cache(*place, (q, *stored), rotation, normed)
        elif rotation is not None:
            q = rotate_queries(*place, q, rotation, normed)
        return attend(spec, cache, batch, self._tiles[at], q, sinks)
