"""Attention over latents by Triton kernels on a GPU; see `gpu/latent_attention.py`."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..checkpoint.model_spec import KeyValueShape, LayerAttention
from ..gpu.attention_plan import DECODE_PLACES
from ..layers.norm import QKNorm
from ..layers.rotary import RotaryAngles, TorchAngles
from ..step_batch import StepBatch
from .backend import AttentionBackend, CacheSpec, heads_side_by_side

if TYPE_CHECKING:
    from ..gpu.latent_attention import LatentAttentionSpec


class TritonLatents(AttentionBackend):
    """A cache of all layers' keys, which are alike, [places, blocks, block_size, key_size]: their first numbers are
    their values."""

    recordable_places = DECODE_PLACES[-1]
    records_prompts = True

    @classmethod
    def supports_heads(cls, spec: CacheSpec) -> bool:
        sees_all = all(kind._replace(scale=None, kept=None) == LayerAttention() for kind in spec.attention)
        alike = spec.kv_cache_dtype == "auto" and len(set(spec.shapes)) == 1
        return alike and sees_all and super().supports_heads(spec)

    @classmethod
    def supports_shape(cls, shape: KeyValueShape, heads: int) -> bool:
        """Latents and rotated parts that tiles have room for."""
        rotated = shape.key_size - shape.value_size
        fits = 1 <= shape.value_size <= 512 and 2 <= rotated <= 128 and rotated % 2 == 0
        return shape.values_in_keys and shape.heads == 1 and fits

    def __init__(self, spec: CacheSpec) -> None:
        from ..gpu.latent_attention import LatentAttentionSpec

        super().__init__(spec)
        self._specs = []
        for kind in spec.distinct_attention:
            kept = spec.kept(kind)
            rotated = kept.key_size - kept.value_size
            scale = kind.scale or kept.key_size**-0.5
            self._specs.append(LatentAttentionSpec(spec.heads, kept.value_size, rotated, spec.block_size, scale))
        self._layers: list[Tensor] = []
        self._blocks: list[Tensor] = []

    def allocate(self, blocks: int) -> None:
        spec = self._spec
        # Earlier ones are freed first.
        self._layers = []
        self._blocks = []
        places = 1 + max(place.number for place in self._layer_places)
        size = places, blocks, spec.block_size, spec.shapes[0].key_size
        numbers = torch.zeros(size, dtype=spec.dtype, device=spec.device)
        self._blocks = [numbers.movedim(1, 0)]
        self._layers = [numbers[place.number] for place in self._layer_places]

    @property
    def device_blocks(self) -> Sequence[Tensor]:
        return self._blocks

    def store(self, batch: StepBatch, layer: int, keys: Tensor, values: Tensor) -> None:
        raise NotImplementedError("values lie in keys")

    def begin_step(self, batch: StepBatch) -> "TritonLatentStep":
        groups = [place.group for place in self._layer_places]
        return TritonLatentStep(batch, self._specs, self._spec.attention_index, self._layers, groups)


class TritonLatentStep:
    """One step's attention; see `StepAttention`. Queries are rotated where they are."""

    def __init__(
        self,
        batch: StepBatch,
        specs: list["LatentAttentionSpec"],
        index: list[int],
        layers: list[Tensor],
        groups: list[int],
    ) -> None:
        from ..gpu.latent_attention import plan_latent_tiles

        self._batch = batch
        self._specs = specs
        self._tiles = [plan_latent_tiles(spec, batch) for spec in specs]
        self._index = index
        self._layers = layers
        self._groups = groups

    def __call__(
        self, layer: int, q: Tensor, k: Tensor | None, v: Tensor | None, sinks: Tensor | None = None
    ) -> Tensor:
        return self._attend(layer, heads_side_by_side(q), k, None)

    def apply_rope_and_attend(
        self, layer: int, packed: Tensor, angles: RotaryAngles, sinks: Tensor | None = None, norm: QKNorm | None = None
    ) -> Tensor:
        assert isinstance(angles, TorchAngles), "the C kernels' angles are for the CPU"
        assert norm is None, "latents are normalised by their layer"
        return self._attend(layer, packed[:, :-1], packed[:, -1:], angles)

    def _attend(self, layer: int, q: Tensor, key: Tensor | None, rotation: TorchAngles | None) -> Tensor:
        from ..gpu.latent_attention import attend_latents, write_latents

        at = self._index[layer]
        batch = self._batch.of_group(self._groups[layer]).on_device
        spec, cache = self._specs[at], self._layers[layer]
        if key is not None:
            write_latents(spec, cache, batch, self._batch.owners, q, heads_side_by_side(key), rotation)
        return attend_latents(spec, cache, batch, self._tiles[at], q)
