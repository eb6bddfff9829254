"""What is left of keys and values that a cache keeps in eight bits, by torch, and attention to that."""

from typing import ClassVar

import torch
from torch import Tensor

from charonia.engine.attention.backend import BackendSupport
from charonia.engine.attention.torch_attention import ReferenceAttention, TorchStepAttention
from charonia.engine.step_batch import StepBatch

CODES = {"int8": (torch.int8, 127.0), "fp8": (torch.float8_e4m3fn, 448.0)}
"""What `--kv-cache-dtype` names: the kind of codes, and the largest."""


def quantise(x: Tensor, kept: str) -> tuple[Tensor, Tensor]:
    """Float32 x [..., n]: its codes, and the largest magnitude of each line, [...], for which the largest code stands.
    A line of zeros has codes of 0."""
    kind, largest_code = CODES[kept]
    largest = x.abs().amax(-1)
    by = (largest_code / largest.where(largest > 0, 1)).clamp(max=3e38)
    scaled = x * by.where(largest > 0, 0).unsqueeze(-1)
    return (scaled.round() if kept == "int8" else scaled).to(kind), largest


def dequantise(codes: Tensor, largest: Tensor) -> Tensor:
    """In float32."""
    largest_code = next(each for kind, each in CODES.values() if kind == codes.dtype)
    return codes.float() * (largest / largest_code).unsqueeze(-1)


def keep(x: Tensor, kept: str) -> Tensor:
    """x as a cache of this `CacheSpec.kv_cache_dtype` gives it back."""
    return x if kept == "auto" else dequantise(*quantise(x.float(), kept)).to(x.dtype)


class KeptReference(ReferenceAttention):
    """Attends by its formula to what is left of keys and values."""

    supports: ClassVar[BackendSupport] = ReferenceAttention.supports._replace(kv_cache_dtypes=("auto", *CODES))

    def begin_step(self, batch: StepBatch) -> TorchStepAttention:
        attend, kept = super().begin_step(batch), self._spec.kv_cache_dtype

        def attend_kept(layer: int, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> Tensor:
            return attend(layer, q, keep(k, kept), keep(v, kept), sinks)

        return TorchStepAttention(attend_kept, self._spec)
