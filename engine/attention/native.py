"""Our own kernels on the CPU: keys and values in the order that dot products want, float32, bfloat16 or int8.

A token's result depends on its sequence and position alone: bit for bit the same whatever shares its step, however its
prompt was cut, and on any number of threads.
"""

from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ..checkpoint.model_spec import LayerAttention
from ..cpu import library
from ..cpu.attention import (
    INT8_CODE,
    MAX_HEAD_DIM,
    MAX_QUERY_FLOATS,
    TILE_TOKENS,
    AttentionParams,
    LayerCaches,
    PlannedAttention,
    StepRows,
)
from ..cpu.memory import HugePageArena
from ..layers.rotary import FusedAngles, RotaryAngles
from ..step_batch import StepBatch
from .backend import BackendSupport, CacheSpec, StepAttention, UnfusedStepAttention


class NativeAttention:
    """Blocks [layers, blocks, tiles, kv_heads] of tiles; int8 has a scale for each token and head."""

    supports: ClassVar[BackendSupport] = BackendSupport(
        ("cpu",), (torch.bfloat16, torch.float32), range(TILE_TOKENS, 4097, TILE_TOKENS), ("auto", "int8")
    )

    @classmethod
    def supports_heads(cls, spec: CacheSpec) -> bool:
        group, size = spec.heads // spec.kv_heads, spec.head_dim
        return size % TILE_TOKENS == 0 and size <= MAX_HEAD_DIM and group * size <= MAX_QUERY_FLOATS

    def __init__(self, spec: CacheSpec) -> None:
        self._spec = spec
        self._params = [_attention_params(spec, view) for view in spec.distinct_attention]
        self._cache = torch.empty(0, dtype=torch.uint8)
        self._layers = self._layer_caches()

    @property
    def block_bytes(self) -> int:
        return self._layer_bytes * self._spec.layers

    @property
    def _layer_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self._spec.block_size // TILE_TOKENS * self._spec.kv_heads * self._params[0].tile_bytes

    def allocate(self, blocks: int) -> None:
        self._cache = torch.empty(0, dtype=torch.uint8)
        size = self._spec.layers * blocks * self._layer_bytes
        self._cache = HugePageArena().allocate(size)[:size].view(self._spec.layers, blocks, self._layer_bytes)
        self._layers = self._layer_caches()

    def copy_blocks(self, moves: Tensor) -> None:
        self._cache[:, moves[:, 1]] = self._cache[:, moves[:, 0]]

    def begin_step(self, batch: StepBatch) -> StepAttention:
        return NativeStepAttention(batch, self._spec, self._layers)

    def _layer_caches(self) -> LayerCaches:
        return LayerCaches(self._params, self._spec.attention_index, [layer.data_ptr() for layer in self._cache])


class NativeStepAttention:
    """One step. It is divided into pieces when layers come one by one: a program does so itself."""

    def __init__(self, batch: StepBatch, spec: CacheSpec, layers: LayerCaches) -> None:
        self.batch, self.caches, self._spec = batch, layers, spec

    @property
    def dtype(self) -> torch.dtype:
        """Of what is computed."""
        return self._spec.dtype

    @property
    def output_size(self) -> int:
        """Features that come out."""
        return self._spec.heads * self._spec.head_dim

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        q, k, v = (_heads_contiguous(heads) for heads in (q, k, v))
        return self._planned_for(layer).attend_separate(self._cache_address(layer), q, k, v, sinks)

    def apply_rope_and_attend(self, layer: int, packed: Tensor, angles: RotaryAngles) -> Tensor:
        if isinstance(angles, FusedAngles):
            return self._planned_for(layer).attend_packed(self._cache_address(layer), packed, angles.cos_sin)
        return UnfusedStepAttention(self, self._spec.heads, self._spec.kv_heads).apply_rope_and_attend(
            layer, packed, angles
        )

    def _planned_for(self, layer: int) -> PlannedAttention:
        return self._plans[self.caches.params_of_layer[layer]]

    def _cache_address(self, layer: int) -> int:
        return self.caches.caches[layer]

    @cached_property
    def _plans(self) -> list[PlannedAttention]:
        step = StepRows(self.batch)
        return [PlannedAttention(manner, step, self._spec.dtype) for manner in self.caches.params]


def _attention_params(spec: CacheSpec, view: LayerAttention) -> AttentionParams:
    kind = library.DTYPE_CODES[spec.dtype]
    stored = INT8_CODE if spec.kv_cache_dtype == "int8" else kind
    sizes = spec.heads, spec.kv_heads, spec.head_dim, spec.block_size
    scale = spec.head_dim**-0.5 if view.scale is None else view.scale
    return AttentionParams(*sizes, view.window or 0, kind, stored, scale, view.softcap or 0.0)


def _heads_contiguous(heads: Tensor) -> Tensor:
    """[N, heads, head_dim] with the heads of a token side by side."""
    return heads if heads.stride(1) == heads.shape[2] and heads.stride(2) == 1 else heads.contiguous()
