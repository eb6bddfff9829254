"""The interface of attention backends: a backend alone allocates, writes and reads cache tensors."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ..checkpoint.model_spec import KeyValueShape, LayerAttention
from ..layers.step_context import StepAttention
from ..step_batch import StepBatch
from .layer_places import BlockStrips, LayerPlace, lay_strips


class CacheSpec(NamedTuple):
    """One rank's cache of keys and values."""

    attention: tuple[LayerAttention, ...]
    """The attention of each layer with keys and values of its own."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads of layers whose attention says nothing else, as the next."""
    head_dim: int
    block_size: int
    """Tokens of a block."""
    dtype: torch.dtype
    """The dtype that is computed in."""
    device: torch.device
    kv_cache_dtype: str = "auto"
    """"auto" stores `dtype`, "int8" and "fp8" (e4m3) a byte for each number and a scale for each token and head."""
    places: tuple[LayerPlace, ...] = ()
    """The place of each layer. Empty: all have one group, and a place each."""

    @property
    def layers(self) -> int:
        return len(self.attention)

    @property
    def distinct_attention(self) -> list[LayerAttention]:
        """Every `LayerAttention` once: a step is prepared for each of them, not for each layer."""
        return list(dict.fromkeys(self.attention))

    def kept(self, kind: LayerAttention) -> KeyValueShape:
        """What such a layer keeps of a token."""
        return kind.kept or KeyValueShape(self.kv_heads, self.head_dim, self.head_dim)

    @property
    def shapes(self) -> list[KeyValueShape]:
        """What each layer keeps of a token."""
        return [self.kept(kind) for kind in self.attention]

    @property
    def layer_places(self) -> tuple[LayerPlace, ...]:
        return self.places or tuple(LayerPlace(0, layer) for layer in range(self.layers))

    def strips(self, sizes: Sequence[int]) -> BlockStrips:
        """The strips of the cache, of whose blocks each layer takes so many units."""
        return lay_strips(self.layer_places, sizes)

    @property
    def attention_index(self) -> list[int]:
        """By layer, the index of its `LayerAttention` in `distinct_attention`."""
        return [self.distinct_attention.index(kind) for kind in self.attention]


class BackendSupport(NamedTuple):
    """The configurations that a backend can serve; `selector.py` reads the fields in this order."""

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    block_sizes: range
    kv_cache_dtypes: tuple[str, ...] = ("auto",)


class AttentionBackend(ABC):
    """A rank's paged cache of keys and values, and attention over it. Backends in torch have heads of any number and
    size, and blocks without padding."""

    adds_by_distance: ClassVar[bool] = False
    """Whether it serves layers with `distances`."""
    supports: ClassVar[BackendSupport] = BackendSupport(
        ("cpu",), (torch.bfloat16, torch.float16, torch.float32), range(1, 4097)
    )

    def __init__(self, spec: CacheSpec) -> None:
        self._spec = spec
        self.dtype = spec.dtype
        """The dtype that is computed in."""
        self.device = spec.device
        self._layer_places = spec.layer_places

    @classmethod
    def supports_heads(cls, spec: CacheSpec) -> bool:
        """Whether the backend can serve what every layer keeps, given that all in `supports` fits."""
        if not cls.adds_by_distance and any(kind.distances for kind in spec.attention):
            return False
        return all(cls.supports_shape(shape, spec.heads) for shape in set(spec.shapes))

    @classmethod
    def supports_shape(cls, shape: KeyValueShape, heads: int) -> bool:
        """Whether it can serve a layer with so many query `heads` that keeps this."""
        return True

    @property
    def recordable_places(self) -> int:
        """The most places that a row may have in a step which is recorded and replayed with other rows: what it
        launches depends on the host's bounds alone, and rows of count 0 touch nothing (`StepBatch.on_device`). 0: no
        step can be recorded."""
        return 0

    @property
    def records_prompts(self) -> bool:
        """Whether rows of a recorded step may also be parts of prompts (`DeviceBatch.prompts`)."""
        return False

    @property
    def block_bytes(self) -> int:
        """Bytes that one block takes, over all layers of a group."""
        spec = self._spec
        room = sum(spec.strips([shape.numbers for shape in spec.shapes]).widths)
        return spec.block_size * room * spec.dtype.itemsize

    @abstractmethod
    def allocate(self, blocks: int) -> None:
        """Make a cache of `blocks` blocks; an earlier one is dropped."""

    @property
    @abstractmethod
    def device_blocks(self) -> Sequence[Tensor]:
        """Views of the cache's memory, each of which has a block's numbers behind its first index."""

    @abstractmethod
    def store(self, batch: StepBatch, layer: int, keys: Tensor, values: Tensor) -> None:
        """Store keys and values [N, kv_heads, size] of a batch's tokens in the cache numbered `layer`; none of them
        attends. Not for layers that keep values in keys."""

    @abstractmethod
    def begin_step(self, batch: StepBatch) -> StepAttention:
        """The attention of one step; what is the same in all layers is computed here, once."""


def heads_side_by_side(x: Tensor) -> Tensor:
    """x [N, heads, size] with the heads of a token side by side in memory, as the kernels want them."""
    return x if x.stride(1) == x.shape[2] and x.stride(2) == 1 else x.contiguous()
