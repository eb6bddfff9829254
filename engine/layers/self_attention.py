"""Grouped-query self-attention (arXiv 2305.13245): projections here, rotation and the cache behind `StepAttention`."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint.build_context import kv_head_slice, rank_slice
from ..checkpoint.model_spec import KeyValueShape, ModelSpec
from ..checkpoint.weights import TensorSlice, WeightLoader
from .head_gate import build_head_gate
from .linear import LayerMatmul, OutputShard, RowLinear, column_linear
from .norm import NormFactory, QKNorm
from .query_growth import build_query_growth
from .rotary import Rotary
from .step_context import StepContext
from .whole_norms import build_whole_norms


class AttentionProjections(NamedTuple):
    """The projections around attention as a checkpoint stores them."""

    qkv_bias: bool = False
    key_bias: bool = True
    """Whether keys have a bias where queries and values have one."""
    out_bias: bool = False
    fused: bool = False
    """Queries, keys and values are in one matrix, and not in three."""
    norm: NormFactory | None = None
    """The norm of each query and key head before rotation (arXiv 2302.05442)."""
    whole_norms: bool = False
    """Whether the norm is one of all query heads of a token, and one of all key heads (arXiv 2501.00656)."""
    gated: bool = False
    """The matrix of queries has a gate behind each head's, whose sigmoid multiplies the head's output
    (arXiv 2505.06708)."""
    adjacent_pairs: bool = False
    """Numbers that are rotated against each other stand side by side in a head, and not half of them apart."""
    normed_values: bool = False
    """Value heads are normalised, too, without weights."""
    values: str = "v_proj"
    """The matrix that makes values: that of keys, too, where both come of one projection."""
    name: str = "self_attn"
    """What a layer calls its attention."""
    out: str = "o_proj"
    norm_suffix: str = "norm"
    """Queries' norm is called q_ and this, keys' k_ and this."""
    sinks: bool = False
    """Each query head has a learned score of nothing (arXiv 2309.17453, 2508.10925)."""
    near: Tensor | None = None
    """What is added to scores by distance, float32 [heads, distances] of all heads (arXiv 1910.10683)."""


class SelfAttention:
    """x [N, hidden] -> [N, hidden], by this rank's heads of layer `index`. `inputs`: x has others than that many."""

    host_bound = False

    def __init__(
        self,
        loader: WeightLoader,
        spec: ModelSpec,
        index: int,
        projections: AttentionProjections,
        rotary: Rotary,
        inputs: int | None = None,
    ) -> None:
        name = f"model.layers.{index}.{projections.name}"
        kind = spec.attention[index]
        assert kind is not None, "the layer attends"
        shape = spec.kept(kind)
        size = shape.key_size
        heads = rank_slice(spec.heads, loader.group)
        kv_heads = kv_head_slice(shape.heads, loader.group)
        queries, keys = (slice(part.start * size, part.stop * size) for part in (heads, kv_heads))
        self._cache_layer = spec.cache_index(index, loader.stage.layers(spec.layers).start)
        self._rotary = rotary
        self._head_dim = size
        self._heads = heads.stop - heads.start
        kept_heads = kv_heads.stop - kv_heads.start if spec.owns_cache(index) else 0
        self._packed_heads = self._heads + 2 * kept_heads
        shards = _qkv_shards(name, spec, shape, queries, keys, projections)
        if not kept_heads:
            del shards[1:]
        elif not projections.key_bias:
            shards[1] = shards[1]._replace(biased=False)
        if projections.adjacent_pairs:
            rotated = spec.layer_rope(index).rotary_dim(size)
            shards[:2] = [part for matrix in shards[:2] for part in _apart(matrix, size, rotated)]
        self._gate: LayerMatmul | None = None
        ungated = None
        if projections.gated:
            matrix = shards[0]._replace(size=2 * shards[0].size)
            own = range(heads.start, heads.stop)
            shards[:1] = [_gated_head(matrix, head, size, 0) for head in own]
            gates = [_gated_head(matrix, head, size, 1) for head in own]
            self._gate = column_linear(loader, gates, inputs or spec.hidden_size, bias=projections.qkv_bias)
            self._output_gate = build_head_gate(loader, len(own), size)
            ungated = self._output_gate.untraceable
        self._qkv = column_linear(loader, shards, inputs or spec.hidden_size, bias=projections.qkv_bias)
        self._norm: QKNorm | None = None
        self._whole_norms = None
        if projections.norm is not None and projections.whole_norms:
            weights_of = (("q", spec.heads, queries), ("k", shape.heads, keys))
            pieces = (
                TensorSlice(f"{name}.{letter}_{projections.norm_suffix}.weight", (count * size,), part)
                for letter, count, part in weights_of
            )
            self._whole_norms = build_whole_norms(loader, projections.norm, spec.norm_eps, *pieces)
        elif projections.norm is not None:  # one for all heads together, each with its own weight
            weights = [loader.vector(f"{name}.q_{projections.norm_suffix}.weight", size).expand(self._heads, -1)]
            if kept_heads:
                of_keys = loader.vector(f"{name}.k_{projections.norm_suffix}.weight", size)
                weights.append(of_keys.expand(kept_heads, -1))
                if projections.normed_values:
                    weights.append(torch.ones_like(of_keys).expand(kept_heads, -1))
            self._norm = QKNorm(projections.norm(torch.cat(weights), spec.norm_eps), sum(map(len, weights)))
        self._growth = build_query_growth(spec, loader.context.max_positions)
        self._sinks = loader.floats(f"{name}.sinks", spec.heads)[heads] if projections.sinks else None
        if projections.near is not None:
            self._sinks = projections.near[heads]
        heads_size = spec.heads * size
        outputs = spec.hidden_size
        out = f"{name}.{projections.out}"
        self._out = RowLinear(loader, out, heads_size, queries, outputs, bias=projections.out_bias)
        self.untraceable = rotary.untraceable or self._out.untraceable or ungated
        if self._growth is not None:
            self.untraceable = self.untraceable or self._growth.untraceable

    def __call__(self, x: Tensor, context: StepContext) -> Tensor:
        packed = self._qkv(x, context).view(-1, self._packed_heads, self._head_dim)
        if self._whole_norms is not None:
            self._whole_norms(packed)
        norm = self._norm
        if self._growth is not None:
            if norm is not None:
                norm(packed)  # queries grow behind it
                norm = None
            self._growth(packed[:, : self._heads], context)
        angles = context.angles(self._rotary)
        mixed = context.attention.apply_rope_and_attend(self._cache_layer, packed, angles, self._sinks, norm)
        if self._gate is not None:
            mixed = self._output_gate(mixed, self._gate(x, context))
        return self._out(mixed, context)


def _apart(matrix: OutputShard, size: int, rotated: int) -> list[OutputShard]:
    """The rows of heads of `size`, of whose first `rotated` ones all first ones of pairs come before all second ones:
    so queries and keys are rotated as others are, and their products are the same."""
    parts = []
    for head in range(matrix.features.start, matrix.features.stop, size):
        end = head + rotated
        rows = slice(head, end, 2), slice(head + 1, end, 2), slice(end, head + size)
        parts += [matrix._replace(features=span) for span in rows if span.start < span.stop]
    return parts


def _gated_head(matrix: OutputShard, head: int, size: int, half: int) -> OutputShard:
    """The query of a head, or the gate behind it."""
    first = (2 * head + half) * size
    return matrix._replace(features=slice(first, first + size))


def _qkv_shards(
    name: str, spec: ModelSpec, shape: KeyValueShape, queries: slice, keys: slice, projections: AttentionProjections
) -> list[OutputShard]:
    """The matrices of queries, keys and values, which are one below the other in one matrix if they are fused."""
    q_size = spec.heads * shape.key_size
    kv_size = shape.heads * shape.key_size
    if projections.fused:
        matrix = OutputShard(f"{name}.qkv_proj", q_size + 2 * kv_size, queries)
        key_rows = matrix._replace(features=keys).shifted(q_size)
        return [matrix, key_rows, key_rows.shifted(kv_size)]
    key_matrix, value_matrix = (OutputShard(f"{name}.{one}", kv_size, keys) for one in ("k_proj", projections.values))
    return [OutputShard(f"{name}.q_proj", q_size, queries), key_matrix, value_matrix]
