"""The rounding of numbers to eight-bit codes, int8 or fp8 (e4m3), in every kernel that makes some: half to even.

The conversion that follows rounds nothing: the interpreter's would lose carries and subnormal numbers."""

import triton
import triton.language as tl

_WHOLE = tl.constexpr(12582912.0)
"""1.5 * 2^23: a float32 below 2^22 loses its fraction when this is added."""
_EIGHTHS = tl.constexpr(1572864.0)
"""1.5 * 2^20: a number below 2 keeps its eighths, the three bits of e4m3's fraction, when this is added."""
_LEAST_NORMAL = tl.constexpr(2.0**-6)


@triton.jit
def to_codes(x, largest, kind: tl.constexpr, LARGEST_CODE: tl.constexpr):
    """The codes of float32 x, of `kind`: LARGEST_CODE stands for `largest`, which no magnitude of x exceeds."""
    something = largest > 0
    by = tl.div_rn(tl.full(largest.shape, LARGEST_CODE, tl.float32), tl.where(something, largest, 1.0))
    scaled = x * tl.where(something, tl.minimum(by, 3e38), 0.0)
    if kind == tl.int8:
        rounder = _WHOLE
    else:
        power = tl.maximum(tl.abs(scaled), _LEAST_NORMAL).to(tl.int32, bitcast=True) & 0x7F800000
        rounder = power.to(tl.float32, bitcast=True) * _EIGHTHS
    return ((scaled + rounder) - rounder).to(kind)
