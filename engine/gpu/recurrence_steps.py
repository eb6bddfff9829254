"""What recurrences by tokens and by chunks of them share: a token's numbers, which tokens are in chunks, and shapes."""

import triton
import triton.language as tl

from ..cpu.recurrent import RecurrenceShape

UNIT_EPS = tl.constexpr(1e-6)


@triton.jit
def softplus(x):
    """log(1 + exp x), exact for small exponentials, too."""
    power = tl.exp(tl.minimum(x, 20.0))
    above = 1.0 + power
    rest = above - 1.0
    small = tl.log(above) * (power / tl.where(rest == 0.0, 1.0, rest))
    return tl.where(x > 20.0, x, tl.where(rest == 0.0, power, small))


@triton.jit
def unit_factor(x):
    """What makes each line of x [n, size] as long as 1, float32 [n]."""
    wide = x.to(tl.float32)
    return tl.rsqrt(tl.sum(wide * wide, 1) + UNIT_EPS)


@triton.jit
def chunk_span(start, count, CHUNK: tl.constexpr):
    """Tokens before the first whole chunk of a row's `count`, which begin at position `start`, and how many there are:
    chunks begin at multiples of CHUNK."""
    lead = (CHUNK - start % CHUNK) % CHUNK
    return lead, tl.maximum(count - lead, 0) // CHUNK


SHAPES = (
    (RecurrenceShape(16, 16, 128, 128, 0, 2048, 4096), True),  # Qwen 3.5 0.8B
    (RecurrenceShape(32, 16, 128, 128, 0, 2048, 4096), True),  # Qwen 3-Next
    (RecurrenceShape(48, 1, 128, 64, 3200, 3072, 0), False),  # Granite 4 hybrid
    (RecurrenceShape(128, 8, 128, 64, 9216, 8192, 0), False),  # Nemotron-H 8B
    (RecurrenceShape(24, 1, 256, 64, 1792, 1536, 0), False),  # Falcon-H1
)
"""Shapes of published models, and whether by the delta rule, for proofs."""
