"""Whether a quantity that is sampled again and again stays where it is. Knows nothing of the quantity."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

_WARM_UP = 1 / 3
"""This share of the looks is left out: pools fill, arenas grow to what the load needs."""
_SIGMAS = 3.0
_LEAST = 0.01
"""Noise is at least this share of the mean: allocators keep pages, and never the same ones twice."""


class Trend(NamedTuple):
    """The straight line of least squares through the samples after the warm-up.

    `growth` along it from the first of them to the last, in the quantity's unit; `slope` per unit of x. `noise` is the
    growth that means nothing: three standard deviations of the samples around the line, or 1 % of the mean.
    """

    mean: float
    slope: float
    growth: float
    noise: float

    @property
    def flat(self) -> bool:
        """Whether it does not grow; it may shrink."""
        return self.growth <= self.noise


def trend(at: Sequence[float], values: Sequence[float]) -> Trend:
    """The trend of `values` over the ascending `at`. At least three samples must remain after the warm-up."""
    skipped = round(len(at) * _WARM_UP)
    x, y = np.array(at[skipped:], float), np.array(values[skipped:], float)
    slope, start = np.polyfit(x, y, 1)
    spread, mean = float(np.std(y - (start + slope * x))), float(np.mean(y))
    return Trend(mean, float(slope), float(slope * (x[-1] - x[0])), max(_SIGMAS * spread, _LEAST * mean))
