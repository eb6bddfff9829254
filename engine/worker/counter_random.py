"""Random numbers as a function of counters: no generator, no state, the same on every device.

SplitMix64's finaliser (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014) over int64
tensors, whose arithmetic wraps as unsigned 64-bit arithmetic does.
"""

from torch import Tensor

_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def as_signed64(value: int) -> int:
    """`value` mod 2**64 as the int64 with the same bits."""
    return ((value + 2**63) % 2**64) - 2**63


def counter_uniform(seeds: Tensor, choices: Tensor, positions: Tensor) -> Tensor:
    """float64 [S] strictly between 0 and 1, one for each (seed, choice, position); all int64 [S]."""
    state = _mix(seeds + as_signed64(_GOLDEN))
    state = _mix(state + choices * as_signed64(_GOLDEN))
    state = _mix(state + positions * as_signed64(_GOLDEN))
    # 52 bits and a half: exact in float64, and never 0 or 1.
    return (_shift(state, 12).double() + 0.5) * 2.0**-52


def _mix(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * as_signed64(_FIRST)
    z = (z ^ _shift(z, 27)) * as_signed64(_SECOND)
    return z ^ _shift(z, 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    """Logical shift to the right; torch's own keeps the sign."""
    return (z >> bits) & ((1 << (64 - bits)) - 1)
