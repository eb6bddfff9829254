"""Attention by our C kernels: keys and values in the order that dot products want, in float32, bfloat16 or int8.

A token's result depends on its sequence and position alone: bit for bit the same whatever shares its step, however its
prompt was cut into steps, and on any number of threads.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ..checkpoint.model_spec import KeyValueShape, LayerAttention
from ..cpu import library
from ..cpu.attention import (
    INT8_CODE,
    MAX_HEAD_DIM,
    MAX_QUERY_FLOATS,
    TILE_TOKENS,
    AttentionParams,
    LayerCaches,
    PlannedAttention,
)
from ..cpu.memory import HugePageArena
from ..layers.norm import QKNorm
from ..layers.rotary import FusedAngles, RotaryAngles
from ..step_batch import StepBatch
from .backend import AttentionBackend, BackendSupport, CacheSpec, heads_side_by_side


class NativeAttention(AttentionBackend):
    """A cache for each width of strips, uint8 [strips, blocks, width]; a layer's part of a block is tiles of 16 tokens
    and one head."""

    adds_by_distance: ClassVar[bool] = True
    supports: ClassVar[BackendSupport] = BackendSupport(
        ("cpu",), (torch.bfloat16, torch.float32), range(TILE_TOKENS, 4097, TILE_TOKENS), ("auto", "int8")
    )

    @classmethod
    def supports_shape(cls, shape: KeyValueShape, heads: int) -> bool:
        size = shape.key_size
        if shape.values_in_keys:
            fits = shape.heads == 1 and shape.value_size % TILE_TOKENS == 0 < shape.value_size
        else:
            fits = shape.value_size == size and heads // shape.heads * size <= MAX_QUERY_FLOATS
        return fits and size % TILE_TOKENS == 0 and size <= MAX_HEAD_DIM

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        dtype = library.DTYPE_CODES[spec.dtype]
        stored = INT8_CODE if spec.kv_cache_dtype == "int8" else dtype
        params = [self._attention_params(kind, dtype, stored) for kind in spec.attention]
        self._strips = spec.strips([own.block_bytes for own in params])
        for own, (strip, _) in zip(params, self._strips.layers, strict=True):
            own.block_bytes = self._strips.widths[strip]
        self._params = list(dict(zip(spec.attention_index, params, strict=True)).values())
        self.allocate(0)

    def _attention_params(self, kind: LayerAttention, dtype: int, stored: int) -> AttentionParams:
        spec = self._spec
        shape = spec.kept(kind)
        latent = shape.value_size if shape.values_in_keys else 0
        kv_heads = _query_parts(spec.heads, shape.key_size) if latent else shape.heads
        sizes = spec.heads, kv_heads, shape.key_size, spec.block_size, kind.window or 0
        scale = kind.scale or shape.key_size**-0.5
        codes = dtype, stored, latent, kind.both_ways
        params = AttentionParams(*sizes, *codes, 0, kind.distances, scale, kind.softcap or 0.0)
        params.block_bytes = spec.block_size // TILE_TOKENS * shape.heads * params.tile_bytes
        return params

    @property
    def block_bytes(self) -> int:
        return sum(self._strips.widths)

    def allocate(self, blocks: int) -> None:
        self._by_width: list[Tensor] = []  # earlier ones are freed first
        size = blocks * self.block_bytes
        free = HugePageArena().allocate(size)[:size]
        begins = [0] * len(self._strips.widths)
        for width, strips in self._strips.by_width.items():
            size = len(strips) * blocks * width
            cache = free[:size].view(len(strips), blocks, width)
            free = free[size:]
            self._by_width.append(cache)
            for strip, own_cache in zip(strips, cache, strict=True):
                begins[strip] = own_cache.data_ptr()
        addresses = [begins[strip] + offset for strip, offset in self._strips.layers]
        groups = [place.group for place in self._layer_places]
        self._caches = LayerCaches(self._params, self._spec.attention_index, addresses, groups)

    @property
    def device_blocks(self) -> Sequence[Tensor]:
        return [cache.transpose(0, 1) for cache in self._by_width]

    def store(self, batch: StepBatch, layer: int, keys: Tensor, values: Tensor) -> None:
        caches = self._caches
        planned = PlannedAttention(caches.params[caches.params_of_layer[layer]], batch, self._spec.dtype)
        stored = heads_side_by_side(keys), heads_side_by_side(values)
        planned.store(caches.caches[layer], caches.groups[layer], stored)

    def begin_step(self, batch: StepBatch) -> "NativeStepAttention":
        return NativeStepAttention(batch, self._spec, self._caches)


def _query_parts(heads: int, size: int) -> int:
    """The fewest equal parts of query heads on one key head of which each fits into a piece of work."""
    divisors = (parts for parts in range(1, heads + 1) if heads % parts == 0)
    return next(parts for parts in divisors if heads // parts * size <= MAX_QUERY_FLOATS)


class NativeStepAttention:
    """One step's attention. A program (`DecoderProgram`) takes its `caches` and plans the step itself; called layer by
    layer, the step is planned at the first call."""

    def __init__(self, batch: StepBatch, spec: CacheSpec, caches: LayerCaches) -> None:
        self.batch = batch
        self._spec = spec
        self.caches = caches
        self.dtype = spec.dtype

    @property
    def output_sizes(self) -> list[int]:
        """Numbers of what each layer returns for a token."""
        return [self._spec.heads * shape.value_size for shape in self._spec.shapes]

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        planned = self._planned[self.caches.params_of_layer[layer]]
        stored = [heads_side_by_side(x) for x in (k, v) if x is not None]
        place = self.caches.caches[layer], self.caches.groups[layer]
        return planned.attend_separate(*place, heads_side_by_side(q), stored, sinks)

    def apply_rope_and_attend(
        self, layer: int, packed: Tensor, angles: RotaryAngles, sinks: Tensor | None = None, norm: QKNorm | None = None
    ) -> Tensor:
        assert isinstance(angles, FusedAngles), "kernels that attend also rotate"
        if norm is not None:
            norm(packed)
        planned = self._planned[self.caches.params_of_layer[layer]]
        place = self.caches.caches[layer], self.caches.groups[layer]
        return planned.attend_packed(*place, packed, angles.cos_sin, sinks)

    @cached_property
    def _planned(self) -> list[PlannedAttention]:
        return [PlannedAttention(params, self.batch, self._spec.dtype) for params in self.caches.params]
