"""Attention of a decoder's tokens to what an encoder made for their sequence (arXiv 1706.03762): keys and values are
made of its rows once, and stand in a cache of their own."""

from torch import Tensor

from ..checkpoint.build_context import kv_head_slice, rank_slice
from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.weights import WeightLoader
from .linear import OutputShard, RowLinear, column_linear, column_slices, joined_bias
from .product_matrix import build_matmul
from .self_attention import AttentionProjections
from .step_context import StepContext


class CrossAttention:
    """x [N, hidden] -> [N, hidden], by this rank's heads of layer `index`, whose cache is numbered `layer`."""

    def __init__(self, loader: WeightLoader, spec: ModelSpec, index: int, projections: AttentionProjections) -> None:
        assert spec.encoder is not None, "the model has an encoder"
        name, size = f"model.layers.{index}.{projections.name}", spec.head_dim
        heads, kv_heads = rank_slice(spec.heads, loader.group), kv_head_slice(spec.kv_heads, loader.group)
        queries, keys = (slice(part.start * size, part.stop * size) for part in (heads, kv_heads))
        self.layer = index - loader.stage.layers(spec.layers).start
        self._heads = (heads.stop - heads.start, size)
        self._stored = (2, kv_heads.stop - kv_heads.start, size)
        of_queries = OutputShard(f"{name}.q_proj", spec.heads * size, queries)
        of_keys = OutputShard(f"{name}.k_proj", spec.kv_heads * size, keys, biased=projections.key_bias)
        stored = [of_keys, OutputShard(f"{name}.v_proj", spec.kv_heads * size, keys)]
        self._queries = column_linear(loader, [of_queries], spec.hidden_size, bias=projections.qkv_bias)
        bias = joined_bias(loader, stored) if projections.qkv_bias else None
        self._keys_values = build_matmul(loader, column_slices(stored, spec.encoder.width), bias)
        inputs = spec.heads * size
        out = f"{name}.{projections.out}"
        self._out = RowLinear(loader, out, inputs, queries, spec.hidden_size, bias=projections.out_bias)
        self.untraceable = self._out.untraceable

    def keys_and_values(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """What is kept of rows [T, width]: keys and values, both [T, kv_heads, head_dim]."""
        keys, values = self._keys_values(rows).view(-1, *self._stored).unbind(1)
        return keys, values

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        queries = self._queries(x, context).view(-1, *self._heads)
        return self._out(context.cross(self.layer, queries, None, None), context)
