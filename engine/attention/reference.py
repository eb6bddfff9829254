"""Attention by its formula in plain torch, on any device: the oracle of every other backend."""

import math
from typing import ClassVar

import torch
from torch import Tensor

from ..checkpoint.model_spec import LayerAttention
from ..layers.step_context import StepAttention
from ..step_batch import StepBatch
from .backend import BackendSupport, CacheSpec, TorchBackend, TorchStepAttention


class ReferenceAttention(TorchBackend):
    """A cache [layers, 2, slots, kv_heads, head_dim]; scores and sums in float32, one sequence at a time."""

    supports: ClassVar[BackendSupport] = TorchBackend.supports._replace(devices=("cpu", "cuda"))

    def __init__(self, spec: CacheSpec) -> None:
        super().__init__(spec)
        self._cache = torch.empty(0)

    def allocate(self, blocks: int) -> None:
        spec = self._spec
        shape = (spec.layers, 2, blocks * spec.block_size, spec.kv_heads, spec.head_dim)
        self._cache = torch.zeros(shape, dtype=spec.dtype, device=spec.device)

    def begin_step(self, batch: StepBatch) -> StepAttention:
        slots = batch.slots()
        counts, starts = batch.counts.tolist(), batch.starts.tolist()
        size = self._spec.block_size
        known = []
        for row, length in enumerate((batch.starts + batch.counts).tolist()):
            positions = torch.arange(length, device=self._spec.device)
            known.append(batch.tables[row, positions // size] * size + positions % size)

        def attend(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
            keys, values = self._cache[layer]
            keys[slots], values[slots] = k, v
            rows = zip(torch.split(q, counts), known, starts, strict=True)
            attention = self._spec.attention[layer]
            return torch.cat(
                [reference_attention(some, keys[at], values[at], start, attention, sinks) for some, at, start in rows]
            )

        return TorchStepAttention(attend, self._spec)


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
