"""Attention over latents (MLA, arXiv 2405.04434): a token keeps one latent for all heads, and what is rotated of a key.

Queries are multiplied with the matrix that makes keys of latents, results with that of values ("absorbed"): all heads
attend to latents as to one key. So do prompts, at three times the arithmetic: bits depend on no cut.
"""

from typing import TypeAlias

import torch
from torch import Tensor

from ..checkpoint.build_context import rank_slice
from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import TensorSlice, WeightLoader
from ..cpu import library
from ..cpu.head_products import FusedHeadProducts
from .linear import OutputShard, RowLinear, column_linear
from .norm import rms_norm
from .rotary import Rotary
from .step_context import StepContext

_LATENT_EPS = 1e-6
"""The epsilon of the norms of latents, whatever config.json says of the others."""


class LatentAttention:
    """x [N, hidden] -> [N, hidden], by this rank's heads of layer `index`; every rank has all latents."""

    host_bound = False

    def __init__(self, loader: WeightLoader, spec: ModelSpec, index: int, rotary: Rotary) -> None:
        assert spec.latent is not None, "the architecture has latents"
        self._latent = latent = spec.latent
        name = f"model.layers.{index}.self_attn"
        hidden, bias = spec.hidden_size, spec.attention_bias
        heads = rank_slice(spec.heads, loader.group)
        self._heads = heads.stop - heads.start
        self._rotary = rotary
        self._cache_layer = spec.cache_index(index, loader.stage.layers(spec.layers).start)
        self._query_latent = None
        query = OutputShard(f"{name}.q_proj", spec.heads * (latent.plain_size + latent.rotated_size), slice(0))
        if latent.query_rank:
            whole = OutputShard(f"{name}.q_a_proj", latent.query_rank, slice(0, latent.query_rank))
            self._query_latent = column_linear(loader, [whole], hidden, bias=bias)
            self._query_norm = rms_norm(loader.vector(f"{name}.q_a_layernorm.weight", latent.query_rank), _LATENT_EPS)
            query = query._replace(name=f"{name}.q_b_proj")
        own = range(heads.start, heads.stop)
        self._queries = column_linear(loader, self._query_shards(query, own), latent.query_rank or hidden, bias=False)
        key = OutputShard(f"{name}.kv_a_proj_with_mqa", latent.rank + latent.rotated_size, slice(0, latent.rank))
        self._keys = column_linear(loader, [key, *self._rotated(key, latent.rank)], hidden, bias=bias)
        self._norm = rms_norm(loader.vector(f"{name}.kv_a_layernorm.weight", latent.rank), _LATENT_EPS)
        made = latent.plain_size + latent.value_size
        rows = slice(heads.start * made, heads.stop * made)
        expanding = TensorSlice(f"{name}.kv_b_proj.weight", (spec.heads * made, latent.rank), rows)
        by_head = loader.concatenate([expanding]).view(self._heads, made, latent.rank)
        loader.count_floats([expanding])
        self._absorb = _head_products(loader, by_head[:, : latent.plain_size].transpose(1, 2), latent.rotated_size)
        self._expand = _head_products(loader, by_head[:, latent.plain_size :])
        values = slice(heads.start * latent.value_size, heads.stop * latent.value_size)
        self._out = RowLinear(loader, f"{name}.o_proj", spec.heads * latent.value_size, values, hidden, bias=bias)
        self._key_size = latent.rank + latent.rotated_size
        self.untraceable = rotary.untraceable or self._out.untraceable

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        key = self._keys(x, context)
        self._norm.norm_part(key, 0)
        if self._query_latent is not None:
            x = self._query_norm(self._query_latent(x, context))
        packed = self._absorb(self._queries(x, context), key).view(-1, self._heads + 1, self._key_size)
        angles = context.angles(self._rotary)
        mixed = context.attention.apply_rope_and_attend(self._cache_layer, packed, angles)
        return self._out(self._expand(mixed), context)

    def _query_shards(self, matrix: OutputShard, heads: range) -> list[OutputShard]:
        """The rows of what is not rotated of all these heads, and behind them those of what is."""
        latent = self._latent
        firsts = [head * (latent.plain_size + latent.rotated_size) for head in heads]
        plain = [matrix._replace(features=slice(first, first + latent.plain_size)) for first in firsts]
        return [*plain, *(shard for first in firsts for shard in self._rotated(matrix, first + latent.plain_size))]

    def _rotated(self, matrix: OutputShard, first: int) -> list[OutputShard]:
        """The rows from `first` on of what is rotated. Of pairs that stand side by side all first ones come before all
        second ones, in queries and keys alike, so their products are the same."""
        end = first + self._latent.rotated_size
        if not self._latent.adjacent_pairs:
            return [matrix._replace(features=slice(first, end))]
        return [matrix._replace(features=slice(start, end, 2)) for start in (first, first + 1)]


class TorchHeadProducts:
    """The same as `FusedHeadProducts` by torch, and its reference."""

    def __init__(self, weights: Tensor, passed: int) -> None:
        self._weights = weights.transpose(1, 2).contiguous()
        self._passed = passed

    def __call__(self, x: Tensor, last: Tensor | None = None) -> Tensor:
        heads, inputs, outputs = self._weights.shape
        own, passing = x[:, : heads * inputs], x[:, heads * inputs :]
        out = x.new_empty(len(x), heads + (last is not None), outputs + self._passed)
        by_head = own.view(len(x), heads, inputs).transpose(0, 1)
        out[:, :heads, :outputs] = torch.bmm(by_head, self._weights).transpose(0, 1)
        out[:, :heads, outputs:] = passing.view(len(x), heads, self._passed)
        if last is not None:
            out[:, heads] = last
        return out.flatten(1)


_HeadProducts: TypeAlias = FusedHeadProducts | TorchHeadProducts


def _head_products(loader: WeightLoader, weights: Tensor, passed: int = 0) -> _HeadProducts:
    """The products of heads with `weights` [heads, outputs, inputs]."""
    if library.supports(loader.dtype, loader.device):
        return FusedHeadProducts(weights, passed, loader.memory)
    return TorchHeadProducts(weights, passed)
