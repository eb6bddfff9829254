"""The seam in front of the cache: only a backend allocates, writes, reads and copies cache tensors."""

from collections.abc import Callable
from typing import ClassVar, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from ..checkpoint.model_spec import LayerAttention
from ..layers.rotary import RotaryAngles
from ..step_batch import StepBatch


class CacheSpec(NamedTuple):
    """One rank's cache: what it holds, in blocks of `block_size` tokens. `heads` are the query heads.

    `views` says of each layer how it attends; layers with a window keep everything too. `stored`: "auto" is the dtype
    computed in, "int8" a byte for each number and a scale for each token and head.
    """

    attention: tuple[LayerAttention, ...]
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype
    device: torch.device
    kv_cache_dtype: str = "auto"

    @property
    def layers(self) -> int:
        return len(self.attention)

    @property
    def distinct_attention(self) -> list[LayerAttention]:
        """Every view once: a step is prepared for each, not for each layer."""
        return list(dict.fromkeys(self.attention))

    @property
    def attention_index(self) -> list[int]:
        """By layer, which of the `kinds` it is of."""
        return [self.distinct_attention.index(view) for view in self.attention]

    @property
    def block_bytes(self) -> int:
        """Bytes of keys and values in one block, over all layers, in the dtype computed in, without padding."""
        return 2 * self.layers * self.block_size * self.kv_heads * self.head_dim * self.dtype.itemsize


class StepAttention(Protocol):
    """Stores keys and values, then lets every token attend to its sequence's tokens up to itself, as far back as the
    layer's view goes."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        """Queries [N, heads, head_dim], keys, values [N, kv_heads, head_dim] -> [N, heads * head_dim].

        `sinks` float32 [heads]: of a layer whose view has them, and of no other."""

    def apply_rope_and_attend(self, layer: int, packed: Tensor, angles: RotaryAngles) -> Tensor:
        """The same for queries, keys and values side by side [N, heads + 2 kv_heads, head_dim], contiguous; `angles`
        turn queries and keys first. What comes out is good until the next layer's call."""


AttentionFunction: TypeAlias = Callable[[int, Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""Attend's plain call."""


class UnfusedStepAttention:
    """An Attend out of the plain function: what turns is turned by itself."""

    def __init__(self, attend: AttentionFunction, heads: int, kv_heads: int) -> None:
        self._attend, self._heads, self._turning = attend, heads, heads + kv_heads

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None = None) -> Tensor:
        return self._attend(layer, q, k, v, sinks)

    def apply_rope_and_attend(self, layer: int, packed: Tensor, angles: RotaryAngles) -> Tensor:
        turned = angles.rotate(packed[:, : self._turning])
        return self._attend(layer, turned[:, : self._heads], turned[:, self._heads :], packed[:, self._turning :], None)


class BackendSupport(NamedTuple):
    """What a backend can do."""

    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    block_sizes: range
    kv_cache_dtypes: tuple[str, ...] = ("auto",)


class AttentionBackend(Protocol):
    """One attention backend with its cache."""

    supports: ClassVar[BackendSupport]

    @classmethod
    def supports_heads(cls, spec: CacheSpec) -> bool:
        """Whether it knows heads like these; what `supports` says is assumed, and that it is here at all."""

    @property
    def block_bytes(self) -> int:
        """Bytes one block takes, over all layers."""

    def allocate(self, blocks: int) -> None:
        """Make a cache of `blocks` blocks; an earlier one is dropped."""

    def copy_blocks(self, moves: Tensor) -> None:
        """Copy whole blocks; `moves` [K, 2] are (from, to) block ids."""

    def begin_step(self, batch: StepBatch) -> StepAttention:
        """Prepare a step: what is the same in all layers is computed here, once."""
