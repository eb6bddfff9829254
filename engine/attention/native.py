"""Our own kernels on the CPU: keys and values in the order that dot products want, float32, bfloat16 or int8.

A token's result depends on its sequence and position alone: bit for bit the same whatever shares its step, however its
prompt was cut, and on any number of threads.
"""

from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from ..checkpoint.model_spec import View
from ..cpu import library
from ..cpu.attention import INT8, MOST_HEAD, MOST_QUERIES, TILE, Layers, Manner, Planned, Step
from ..cpu.memory import Memory
from ..layers.rotary import Angles, FusedAngles
from ..step_batch import Batch
from .backend import Attend, CacheSpec, Support, Turning


class NativeAttention:
    """Blocks [layers, blocks, tiles, kv_heads] of tiles; int8 has a scale for each token and head."""

    supports: ClassVar[Support] = Support(
        ("cpu",), (torch.bfloat16, torch.float32), range(TILE, 4097, TILE), ("auto", "int8")
    )

    @classmethod
    def fits(cls, spec: CacheSpec) -> bool:
        group, size = spec.heads // spec.kv_heads, spec.head_dim
        return size % TILE == 0 and size <= MOST_HEAD and group * size <= MOST_QUERIES

    def __init__(self, spec: CacheSpec) -> None:
        self._spec = spec
        self._manners = [_manner(spec, view) for view in spec.kinds]
        self._cache = torch.empty(0, dtype=torch.uint8)
        self._layers = self._addressed()

    @property
    def block_bytes(self) -> int:
        return self._layer_bytes * self._spec.layers

    @property
    def _layer_bytes(self) -> int:
        """Bytes of one block in one layer."""
        return self._spec.block_size // TILE * self._spec.kv_heads * self._manners[0].tile_bytes

    def allocate(self, blocks: int) -> None:
        self._cache = torch.empty(0, dtype=torch.uint8)
        size = self._spec.layers * blocks * self._layer_bytes
        self._cache = Memory().take(size)[:size].view(self._spec.layers, blocks, self._layer_bytes)
        self._layers = self._addressed()

    def copy(self, moves: Tensor) -> None:
        self._cache[:, moves[:, 1]] = self._cache[:, moves[:, 0]]

    def begin(self, batch: Batch) -> Attend:
        return NativeAttend(batch, self._spec, self._layers)

    def _addressed(self) -> Layers:
        return Layers(self._manners, self._spec.kind_of, [layer.data_ptr() for layer in self._cache])


class NativeAttend:
    """One step. It is divided into pieces when layers come one by one: a program does so itself."""

    def __init__(self, batch: Batch, spec: CacheSpec, layers: Layers) -> None:
        self.batch, self.layers, self._spec = batch, layers, spec

    @property
    def dtype(self) -> torch.dtype:
        """Of what is computed."""
        return self._spec.dtype

    @property
    def width(self) -> int:
        """Features that come out."""
        return self._spec.heads * self._spec.head_dim

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        q, k, v = (_side_by_side(heads) for heads in (q, k, v))
        return self._planned(layer).apart(self._cache(layer), q, k, v, sinks)

    def turned(self, layer: int, packed: Tensor, angles: Angles) -> Tensor:
        if isinstance(angles, FusedAngles):
            return self._planned(layer).packed(self._cache(layer), packed, angles.turns)
        return Turning(self, self._spec.heads, self._spec.kv_heads).turned(layer, packed, angles)

    def _planned(self, layer: int) -> Planned:
        return self._plans[self.layers.kind_of[layer]]

    def _cache(self, layer: int) -> int:
        return self.layers.caches[layer]

    @cached_property
    def _plans(self) -> list[Planned]:
        step = Step(self.batch)
        return [Planned(manner, step, self._spec.dtype) for manner in self.layers.manners]


def _manner(spec: CacheSpec, view: View) -> Manner:
    kind = library.DTYPES[spec.dtype]
    stored = INT8 if spec.stored == "int8" else kind
    sizes = spec.heads, spec.kv_heads, spec.head_dim, spec.block_size
    scale = spec.head_dim**-0.5 if view.scale is None else view.scale
    return Manner(*sizes, view.window or 0, kind, stored, scale, view.cap or 0.0)


def _side_by_side(heads: Tensor) -> Tensor:
    """[N, heads, head_dim] with the heads of a token side by side."""
    return heads if heads.stride(1) == heads.shape[2] and heads.stride(2) == 1 else heads.contiguous()
