"""Attention by Triton kernels on a GPU: decoding rows in one launch, chunks of prompts in another, whatever is mixed in
a step. A row's result depends on its own tokens alone, but for a chunk's, on how its prompt was cut."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..gpu.attention_plan import AttentionSpec, CacheShape, StepTiles, plan_tiles
from ..layers.rotary import RotaryAngles, TorchAngles
from ..step_batch import StepBatch
from .backend import AttentionBackend, BackendSupport, CacheSpec


class TritonAttention(AttentionBackend):
    """A cache [layers, keys and values, blocks, kv_heads, block_size, head_dim]."""

    supports: ClassVar[BackendSupport] = AttentionBackend.supports._replace(devices=("cpu", "cuda"))

    @classmethod
    def supports_heads(cls, spec: CacheSpec) -> bool:
        return 16 <= spec.head_dim <= 256 and spec.heads // spec.kv_heads <= 64

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self._shape = CacheShape(spec.heads, spec.kv_heads, spec.head_dim, spec.block_size)
        usual = spec.head_dim**-0.5
        self._specs = [
            AttentionSpec(self._shape, each.scale or usual, each.window or 0, each.softcap or 0.0)
            for each in spec.distinct_attention
        ]
        self._index = spec.attention_index
        self._cache = torch.empty(0)

    @property
    def recordable_places(self) -> int:
        return min(each.most_decoded for each in self._specs)

    def allocate(self, blocks: int) -> None:
        spec, self._cache = self._spec, torch.empty(0)  # an earlier one is freed first
        shape = (spec.layers, 2, blocks, spec.kv_heads, spec.block_size, spec.head_dim)
        self._cache = torch.empty(shape, dtype=spec.dtype, device=spec.device)

    @property
    def device_blocks(self) -> Sequence[Tensor]:
        return (self._cache.movedim(2, 0),)

    def begin_step(self, batch: StepBatch) -> "TritonStepAttention":
        tiles = [plan_tiles(each, batch) for each in self._specs]
        return TritonStepAttention(batch, self._specs, tiles, self._index, self._cache)


class TritonStepAttention:
    """One step's attention; see `StepAttention`."""

    def __init__(
        self, batch: StepBatch, specs: list[AttentionSpec], tiles: list[StepTiles], index: list[int], cache: Tensor
    ) -> None:
        self._batch, self._specs, self._tiles, self._index, self._cache = batch, specs, tiles, index, cache

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        q, k, v = (each if each.stride()[1:] == (each.shape[2], 1) else each.contiguous() for each in (q, k, v))
        return self._attend(layer, (q, k, v), sinks, None)

    def apply_rope_and_attend(self, layer: int, packed: Tensor, angles: RotaryAngles) -> Tensor:
        assert isinstance(angles, TorchAngles), "the C kernels' angles are for the CPU"
        shape = self._specs[0].shape
        q, k, v = torch.split(packed, [shape.heads, shape.kv_heads, shape.kv_heads], 1)
        return self._attend(layer, (q, k, v), None, angles)

    def _attend(
        self, layer: int, qkv: tuple[Tensor, Tensor, Tensor], sinks: Tensor | None, rotation: TorchAngles | None
    ) -> Tensor:
        from ..gpu.attention import attend
        from ..gpu.cache_write import write_cache

        at, batch = self._index[layer], self._batch.on_device
        spec, keys, values = self._specs[at], self._cache[layer, 0], self._cache[layer, 1]
        q = write_cache(spec.shape, (keys, values), batch, self._batch.owners, qkv, rotation)
        return attend(spec, (keys, values), batch, self._tiles[at], q, sinks)
