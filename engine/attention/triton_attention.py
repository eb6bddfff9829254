"""Attention by Triton kernels on a GPU: decoding rows in one launch, chunks of prompts in another, whatever is mixed in
a step. A row's result depends on its own tokens alone, but for a chunk's, on how its prompt was cut."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from ..gpu.attention_plan import AttentionSpec, CacheShape, LayerCache, StepTiles, plan_tiles
from ..layers.rotary import RotaryAngles, TorchAngles
from ..step_batch import StepBatch
from .backend import AttentionBackend, BackendSupport, CacheSpec

CODES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""What the numbers of a cache are kept as, by `CacheSpec.kv_cache_dtype`, rounded once, when they are written. Either
has a scale for each token and head, after its largest magnitude (float32): nothing is calibrated, and nothing is out of
range. Of numbers above a fourteenth of that largest one int8 keeps more than fp8 (e4m3), of smaller ones fp8."""


class TritonAttention(AttentionBackend):
    """A cache [layers, keys and values, blocks, kv_heads, block_size, head_dim]; of codes also `LayerCache.scales` of
    all layers, [layers, blocks, kv_heads, block_size, keys and values]."""

    supports: ClassVar[BackendSupport] = AttentionBackend.supports._replace(
        devices=("cpu", "cuda"), kv_cache_dtypes=("auto", *CODES)
    )

    @classmethod
    def supports_heads(cls, spec: CacheSpec) -> bool:
        return 16 <= spec.head_dim <= 256 and spec.heads // spec.kv_heads <= 64

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        codes = CODES.get(spec.kv_cache_dtype)
        self._shape = CacheShape(spec.heads, spec.kv_heads, spec.head_dim, spec.block_size, codes)
        usual = spec.head_dim**-0.5
        self._specs = [
            AttentionSpec(self._shape, kind.scale or usual, kind.window or 0, kind.softcap or 0.0)
            for kind in spec.distinct_attention
        ]
        self._index = spec.attention_index
        self._cache = torch.empty(0)
        self._scales = torch.empty(0)
        self._layers: list[LayerCache] = []

    @property
    def block_bytes(self) -> int:
        codes = self._shape.codes
        lines = 2 * self._spec.layers * self._spec.block_size * self._spec.kv_heads
        return super().block_bytes if codes is None else lines * (self._spec.head_dim + torch.float32.itemsize)

    @property
    def recordable_places(self) -> int:
        return min(spec.most_decoded for spec in self._specs)

    def allocate(self, blocks: int) -> None:
        spec = self._spec
        codes = self._shape.codes
        # Earlier ones are freed first.
        self._layers = []
        self._cache = torch.empty(0)
        self._scales = torch.empty(0)
        lines = blocks, spec.kv_heads, spec.block_size
        shape = (spec.layers, 2, *lines, spec.head_dim)
        # Zeros: a head that drafts attends to places that it never wrote, where memory may hold what is no number.
        self._cache = torch.zeros(shape, dtype=codes or spec.dtype, device=spec.device)
        if codes is None:
            self._layers = [LayerCache(layer[0], layer[1]) for layer in self._cache]
            return
        self._scales = torch.zeros((spec.layers, *lines, 2), dtype=torch.float32, device=spec.device)
        both = zip(self._cache, self._scales, strict=True)
        self._layers = [LayerCache(layer[0], layer[1], scales) for layer, scales in both]

    @property
    def device_blocks(self) -> Sequence[Tensor]:
        numbers = self._cache.movedim(2, 0)
        return (numbers,) if self._shape.codes is None else (numbers, self._scales.movedim(1, 0))

    def begin_step(self, batch: StepBatch) -> "TritonStepAttention":
        tiles = [plan_tiles(spec, batch) for spec in self._specs]
        return TritonStepAttention(batch, self._specs, tiles, self._index, self._layers)


class TritonStepAttention:
    """One step's attention; see `StepAttention`."""

    def __init__(
        self,
        batch: StepBatch,
        specs: list[AttentionSpec],
        tiles: list[StepTiles],
        index: list[int],
        layers: list[LayerCache],
    ) -> None:
        self._batch = batch
        self._specs = specs
        self._tiles = tiles
        self._index = index
        self._layers = layers

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        q, k, v = (x if x.stride()[1:] == (x.shape[2], 1) else x.contiguous() for x in (q, k, v))
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

        at = self._index[layer]
        batch = self._batch.on_device
        spec = self._specs[at]
        cache = self._layers[layer]
        q = write_cache(spec.shape, cache, batch, self._batch.owners, qkv, rotation)
        return attend(spec, cache, batch, self._tiles[at], q, sinks)
