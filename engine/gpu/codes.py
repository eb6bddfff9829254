"""Numbers as eight-bit codes, int8 or fp8 (e4m3), that share the scale of their row: the rounding of every kernel that
makes some. Half goes to even; what is then converted is a code already, so that the conversion rounds nothing (the
interpreter's loses carries, and numbers below the normal ones)."""

import triton
import triton.language as tl

_WHOLE = tl.constexpr(12582912.0)
"""1.5 * 2^23: a float32 of less than 2^22 that it is added to keeps no fraction."""
_EIGHTHS = tl.constexpr(1572864.0)
"""1.5 * 2^20: likewise, added to a number below 2 it leaves eighths, e4m3's three bits of fraction."""
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
