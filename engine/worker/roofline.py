"""The bound of memory on decoding: on a CPU each token of a lone sequence reads every weight it goes through once.

Knows sizes and the memory's speed; nothing of kernels, or of what a batch computes.
"""

import time
from typing import NamedTuple

import torch

from ..checkpoint.model_spec import DecoderShape, ModelSpec

CACHED = 1 << 26
"""Weights of fewer bytes may stay in the processor's caches: memory does not bound them."""

_SAMPLE = 1 << 27
_READS = 4


class Roofline(NamedTuple):
    """`weights`: bytes read for a token, kept as `kind`; `bandwidth`: bytes a second."""

    weights: int
    kind: str
    bandwidth: float

    def __str__(self) -> str:
        return (
            f"memory read at {self.bandwidth / 1e9:.0f} GB/s now, {self.weights / 1e6:.0f} MB of {self.kind} weights"
            f" a token: one sequence decodes at most {self.bandwidth / self.weights:.0f} tokens/s"
        )


def measure_roofline(shape: DecoderShape, kind: torch.dtype) -> Roofline | None:
    """The bound of a model whose matrices are kept as `kind`; measures the memory, for less than 0.2 s.

    None where no model of ours computes, or memory is not what bounds it.
    """
    weights = token_weights(shape) * kind.itemsize if isinstance(shape, ModelSpec) else 0
    if weights < CACHED:
        return None
    return Roofline(weights, str(kind).removeprefix("torch."), read_bandwidth())


def token_weights(spec: ModelSpec) -> int:
    """Numbers in the matrices that one token goes through; of a mixture, in those of the experts it is routed to."""
    attention = 2 * spec.hidden_size * (spec.heads + spec.kv_heads) * spec.head_dim
    dense = 3 * spec.hidden_size * spec.intermediate_size
    widths = [dense] * spec.layers
    if spec.experts is not None:
        sparse = 3 * spec.hidden_size * spec.experts.intermediate_size * spec.experts.per_token
        widths = [sparse if mixed else dense for mixed in spec.experts.sparse_layers]
    return spec.layers * attention + sum(widths) + spec.vocab_size * spec.hidden_size


def read_bandwidth() -> float:
    """Bytes a second that torch's threads read from memory, the best of a few times."""
    sample = torch.ones(_SAMPLE // 4)
    return _SAMPLE / min(_read(sample) for _ in range(_READS))


def _read(sample: torch.Tensor) -> float:
    begin = time.perf_counter()
    sample.sum()
    return time.perf_counter() - begin
