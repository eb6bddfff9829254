"""Grouped-query self-attention: projections and rotation here, the cache behind `StepAttention`."""

from typing import NamedTuple

import torch
from torch import Tensor

from ..attention.backend import StepAttention
from ..checkpoint.model_spec import ModelSpec
from ..checkpoint.tensor_group import head_features, kv_head_slice, rank_slice
from ..checkpoint.weights import WeightLoader
from .linear import ColumnLinear, OutputShard, RowLinear
from .norm import Norm, NormFactory
from .rotary import RotaryAngles


class AttentionProjections(NamedTuple):
    """What a checkpoint has around attention: biases, one matrix `fused` of queries, keys and values or three, and a
    `norm` of every query and key head before it is turned (arXiv 2302.05442)."""

    qkv_bias: bool = False
    out_bias: bool = False
    fused: bool = False
    norm: NormFactory | None = None


class SelfAttention:
    """x [N, hidden] -> [N, hidden], this rank's heads of layer `index`."""

    def __init__(self, load: WeightLoader, spec: ModelSpec, index: int, has: AttentionProjections) -> None:
        name, size = f"model.layers.{index}.self_attn", spec.head_dim
        heads, kv_heads = rank_slice(spec.heads, load.group), kv_head_slice(spec.kv_heads, load.group)
        self._cached_as, self._head_dim = load.layers(spec.layers).index(index), size  # a rank counts its own layers
        self._heads, self._kv_heads = heads.stop - heads.start, kv_heads.stop - kv_heads.start
        outputs = (_fused_qkv if has.fused else _separate_qkv)(
            name, spec, head_features(heads, size), head_features(kv_heads, size)
        )
        self._qkv = ColumnLinear(load, outputs, spec.hidden_size, bias=has.qkv_bias)
        self._norm = None if has.norm is None else self._head_norm(load, name, spec, has.norm)
        columns = head_features(heads, size)
        self._out = RowLinear(load, f"{name}.o_proj", spec.heads * size, columns, spec.hidden_size, bias=has.out_bias)

    def __call__(self, x: Tensor, angles: RotaryAngles, attend: StepAttention) -> Tensor:
        packed = self._qkv(x).view(len(x), -1, self._head_dim)
        if self._norm is not None:
            self._norm.norm_heads(packed, self._heads + self._kv_heads)
        return self._out(attend.apply_rope_and_attend(self._cached_as, packed, angles))

    def _head_norm(self, load: WeightLoader, name: str, spec: ModelSpec, norm: NormFactory) -> Norm:
        """One norm for the heads of queries and keys together, each with its own weight."""
        queries, keys = (load.vector(f"{name}.{one}_norm.weight", spec.head_dim) for one in "qk")
        weight = torch.cat((queries.expand(self._heads, -1), keys.expand(self._kv_heads, -1)))
        return norm(weight, spec.norm_eps)


def _separate_qkv(name: str, spec: ModelSpec, queries: slice, keys: slice) -> list[OutputShard]:
    kv_size = spec.kv_heads * spec.head_dim
    return [
        OutputShard(f"{name}.q_proj", spec.heads * spec.head_dim, queries),
        OutputShard(f"{name}.k_proj", kv_size, keys),
        OutputShard(f"{name}.v_proj", kv_size, keys),
    ]


def _fused_qkv(name: str, spec: ModelSpec, queries: slice, keys: slice) -> list[OutputShard]:
    """Queries, keys and values one below the other."""
    q_size, kv_size = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
    matrix = OutputShard(f"{name}.qkv_proj", q_size + 2 * kv_size, queries)
    key_rows = matrix._replace(features=keys).shifted(q_size)
    return [matrix, key_rows, key_rows.shifted(kv_size)]
