"""Attention over latents (MLA, arXiv 2405.04434): a token keeps one latent for all heads, and what is rotated of a key.

The matrix that makes a head's keys of latents multiplies its queries instead, and the one that makes values what the
head gets ("absorbed"): all heads attend to the latents as to one key. It is so for prompts, too, at three times the
arithmetic of attention by itself: so a token has the same bits wherever a prompt was cut, and from a cached prefix.
"""

import torch
from torch import Tensor

from ..checkpoint.build_context import rank_slice
from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import TensorSlice, WeightLoader
from ..cpu import library
from ..cpu.matmul import MatmulFormat, PackedMatmul
from .linear import OutputShard, RowLinear, column_linear
from .norm import rms_norm
from .rotary import Rotary
from .step_context import StepContext

_LATENT_EPS = 1e-6
"""Of the norms of latents, whatever config.json says of the others."""


class LatentAttention:
    """x [N, hidden] -> [N, hidden], by this rank's heads of layer `index`; every rank has all latents."""

    untraceable: str | None = "it attends over latents"

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
        self._absorb = HeadProducts(loader, by_head[:, : latent.plain_size].transpose(1, 2))
        self._expand = HeadProducts(loader, by_head[:, latent.plain_size :])
        values = slice(heads.start * latent.value_size, heads.stop * latent.value_size)
        self._out = RowLinear(loader, f"{name}.o_proj", spec.heads * latent.value_size, values, hidden, bias=bias)

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        latent, angles = self._latent, context.angles(self._rotary)
        made = self._keys(x, context)
        key = torch.empty(len(x), 1, latent.rank + latent.rotated_size, dtype=x.dtype, device=x.device)
        key[:, 0, : latent.rank] = self._norm(made[:, : latent.rank].contiguous())
        key[..., latent.rank :] = angles.rotate(made[:, latent.rank :].unsqueeze(1))
        if self._query_latent is not None:
            x = self._query_norm(self._query_latent(x, context))
        queries = self._queries(x, context)
        plain, rotated = torch.split(queries, [self._heads * latent.plain_size, self._heads * latent.rotated_size], -1)
        query = key.new_empty(len(x), self._heads, key.shape[-1])
        self._absorb(plain.view(len(x), self._heads, latent.plain_size), query[..., : latent.rank])
        query[..., latent.rank :] = angles.rotate(rotated.view(len(x), self._heads, latent.rotated_size))
        mixed = context.attention(self._cache_layer, query, key, None).view(len(x), self._heads, latent.rank)
        values = query.new_empty(len(x), self._heads, latent.value_size)
        self._expand(mixed, values)
        return self._out(values.flatten(1), context)

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


class HeadProducts:
    """A product for each head, with weights of its own, which stay in the model's dtype. By the C kernels a row's
    result does not depend on the rows beside it."""

    def __init__(self, loader: WeightLoader, weights: Tensor) -> None:
        """`weights` [heads, outputs, inputs]."""
        self._products: list[PackedMatmul] = []
        if not library.supports(loader.dtype, loader.device):
            self._weights = weights.transpose(1, 2).contiguous()
            return
        _, outputs, inputs = weights.shape
        form = MatmulFormat(outputs, inputs, loader.dtype, loader.dtype, loader.dtype)
        for weight in weights:
            product = PackedMatmul(form, None, loader.memory)
            product.pack(0, weight.contiguous())
            self._products.append(product)

    def __call__(self, x: Tensor, out: Tensor) -> None:
        """x [N, heads, inputs] -> `out` [N, heads, outputs]; the numbers of a head are contiguous in both."""
        if not self._products:
            out.copy_(torch.bmm(x.transpose(0, 1), self._weights).transpose(0, 1))
        for head, product in enumerate(self._products):
            product.multiply_into(x[:, head], out[:, head])
