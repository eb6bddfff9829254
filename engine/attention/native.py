"""Attention by our C kernels: keys and values in the order that dot products want, in float32, bfloat16 or int8.

A token's result depends on its sequence and position alone: bit for bit the same whatever shares its step, however its
prompt was cut into steps, and on any number of threads.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

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
from ..layers.rotary import FusedAngles, RotaryAngles
from ..step_batch import StepBatch
from .backend import AttentionBackend, BackendSupport, CacheSpec


class NativeAttention(AttentionBackend):
    """A cache, uint8 [layers, blocks, bytes of a block]; a block is tiles of 16 tokens and one head."""

    supports: ClassVar[BackendSupport] = BackendSupport(
        ("cpu",), (torch.bfloat16, torch.float32), range(TILE_TOKENS, 4097, TILE_TOKENS), ("auto", "int8")
    )

    @classmethod
    def supports_heads(cls, spec: CacheSpec) -> bool:
        group = spec.heads // spec.kv_heads
        size = spec.head_dim
        return size % TILE_TOKENS == 0 and size <= MAX_HEAD_DIM and group * size <= MAX_QUERY_FLOATS

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        dtype = library.DTYPE_CODES[spec.dtype]
        usual_scale = spec.head_dim**-0.5
        stored = INT8_CODE if spec.kv_cache_dtype == "int8" else dtype
        sizes = spec.heads, spec.kv_heads, spec.head_dim, spec.block_size
        self._params = [
            AttentionParams(*sizes, kind.window or 0, dtype, stored, kind.scale or usual_scale, kind.softcap or 0.0)
            for kind in spec.distinct_attention
        ]
        self._layer_bytes = spec.block_size // TILE_TOKENS * spec.kv_heads * self._params[0].tile_bytes
        self.allocate(0)

    @property
    def block_bytes(self) -> int:
        return self._layer_bytes * self._spec.layers

    def allocate(self, blocks: int) -> None:
        self._cache = torch.empty(0, dtype=torch.uint8)  # an earlier one is freed first
        size = blocks * self.block_bytes
        self._cache = HugePageArena().allocate(size)[:size].view(self._spec.layers, blocks, self._layer_bytes)
        addresses = [layer.data_ptr() for layer in self._cache]
        self._caches = LayerCaches(self._params, self._spec.attention_index, addresses)

    @property
    def device_blocks(self) -> Sequence[Tensor]:
        return (self._cache.transpose(0, 1),)

    def begin_step(self, batch: StepBatch) -> "NativeStepAttention":
        return NativeStepAttention(batch, self._spec, self._caches)


class NativeStepAttention:
    """One step's attention. A program (`DecoderProgram`) takes its `caches` and plans the step itself; called layer by
    layer, the step is planned at the first call."""

    def __init__(self, batch: StepBatch, spec: CacheSpec, caches: LayerCaches) -> None:
        self._batch = batch
        self._spec = spec
        self.caches = caches
        self.dtype = spec.dtype
        self.output_size = spec.heads * spec.head_dim

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        # The kernel wants the heads of a token side by side in memory.
        q, k, v = (x if x.stride(1) == x.shape[2] and x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
        planned = self._planned[self.caches.params_of_layer[layer]]
        return planned.attend_separate(self.caches.caches[layer], q, k, v, sinks)

    def apply_rope_and_attend(self, layer: int, packed: Tensor, angles: RotaryAngles) -> Tensor:
        assert isinstance(angles, FusedAngles), "kernels that attend also rotate"
        planned = self._planned[self.caches.params_of_layer[layer]]
        return planned.attend_packed(self.caches.caches[layer], packed, angles.cos_sin)

    @cached_property
    def _planned(self) -> list[PlannedAttention]:
        return [PlannedAttention(params, self._batch, self._spec.dtype) for params in self.caches.params]
