"""Attention by its formula in plain torch, on any device: the oracle of every other backend."""

import math
from typing import ClassVar

import torch
from torch import Tensor

from ..checkpoint.model_spec import LayerAttention
from ..layers.step_context import StepAttention
from ..step_batch import StepBatch
from .backend import BackendSupport, CacheSpec, UnfusedStepAttention

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class ReferenceAttention:
    """A cache [layers, 2, slots, kv_heads, head_dim]; scores and sums in float32, one sequence at a time."""

    supports: ClassVar[BackendSupport] = BackendSupport(("cpu", "cuda"), DTYPES, range(1, 4097))

    @classmethod
    def supports_heads(cls, spec: CacheSpec) -> bool:
        return True

    def __init__(self, spec: CacheSpec) -> None:
        self._spec = spec
        self._cache = torch.empty(0)

    @property
    def block_bytes(self) -> int:
        return self._spec.block_bytes

    def allocate(self, blocks: int) -> None:
        spec = self._spec
        shape = (spec.layers, 2, blocks * spec.block_size, spec.kv_heads, spec.head_dim)
        self._cache = torch.zeros(shape, dtype=spec.dtype, device=spec.device)

    def begin_step(self, batch: StepBatch) -> StepAttention:
        slots = batch.slots()
        known = [self._known(batch, row) for row in range(len(batch.starts))]
        counts, starts = batch.counts.tolist(), batch.starts.tolist()

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
            keys, values = self._cache[layer]
            keys[slots], values[slots] = k, v
            rows = zip(torch.split(q, counts), known, starts, strict=True)
            attention = self._spec.attention[layer]
            return torch.cat(
                [reference_attention(some, keys[at], values[at], start, attention, sinks) for some, at, start in rows]
            )

        return UnfusedStepAttention(attend, self._spec.heads, self._spec.kv_heads)

    def _known(self, batch: StepBatch, row: int) -> Tensor:
        """The slots [T] of all tokens of a row, this step's included."""
        size = self._spec.block_size
        positions = torch.arange(int(batch.starts[row] + batch.counts[row]), device=self._spec.device)
        return batch.tables[row, positions // size] * size + positions % size


def reference_attention(
    q: Tensor, k: Tensor, v: Tensor, start: int, attention: LayerAttention, sinks: Tensor | None = None
) -> Tensor:
    """Causal grouped-query attention of one sequence: q [n, heads, d] at positions from `start`, k [T, kv_heads, d] and
    v [T, kv_heads, e] at positions from 0; [n, heads * e] in q's dtype. (arXiv 1706.03762, 2305.13245; the window
    2310.06825, the cap 2408.00118, the sinks 2508.10925.)"""
    count, heads, head_dim = q.shape
    group = heads // k.shape[1]
    keys, values = k.float().repeat_interleave(group, 1), v.float().repeat_interleave(group, 1)
    scores = torch.einsum("nhd,thd->hnt", q.float(), keys) * (attention.scale or head_dim**-0.5)
    if attention.softcap is not None:
        scores = attention.softcap * torch.tanh(scores / attention.softcap)
    back = torch.arange(start, start + count, device=q.device).unsqueeze(-1) - torch.arange(len(k), device=q.device)
    hidden = back < 0 if attention.window is None else (back < 0) | (back >= attention.window)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.view(heads, 1, 1).expand(heads, count, 1)), -1)
    weights = scores.softmax(-1)[..., : len(k)]
    return torch.einsum("hnt,thd->nhd", weights, values).to(q.dtype).flatten(1)
