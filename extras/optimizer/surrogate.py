"""A Gaussian process over configurations: what those that were not measured may be, from those that were.

After Rasmussen and Williams, Gaussian Processes for Machine Learning (2006), algorithm 2.1; expected improvement after
Jones, Schonlau and Welch (1998).
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.floating[Any]]

_LENGTHS = (0.35, 0.7, 1.4, 2.8)
"""Distances over which values are alike; the likeliest is taken. A parameter's values span 1."""


class Surrogate:
    """Fitted to `values` at `points` [measured, dimensions]; `noise`: the standard deviation of each value."""

    def __init__(self, points: Floats, values: Sequence[float], noise: Sequence[float]) -> None:
        self._points = points
        targets = np.array(values)
        errors = np.array(noise)
        self._mean = float(np.mean(targets))
        self._variance = max(float(np.var(targets)), 1e-4)
        centred = targets - self._mean
        fits = [self._fit(length, centred, errors) for length in _LENGTHS]
        _, self._length, self._factor, self._weights = max(fits, key=lambda fit: fit[0])

    def _fit(self, length: float, centred: Floats, errors: Floats) -> tuple[float, float, Floats, Floats]:
        covariance = self._kernel(self._points, self._points, length) + np.diag(errors**2 + 1e-9)
        factor: Floats = np.linalg.cholesky(covariance)
        weights: Floats = np.linalg.solve(factor.T, np.linalg.solve(factor, centred))
        likelihood = -0.5 * float(centred @ weights) - float(np.log(np.diag(factor)).sum())
        return likelihood, length, factor, weights

    def _kernel(self, one: Floats, other: Floats, length: float) -> Floats:
        """Matern 5/2."""
        distance = np.sqrt(((one[:, None] - other[None]) ** 2).sum(axis=2)) * (math.sqrt(5) / length)
        kernel: Floats = self._variance * (1 + distance + distance**2 / 3) * np.exp(-distance)
        return kernel

    def predict(self, points: Floats) -> tuple[Floats, Floats]:
        """Means and standard deviations there."""
        between = self._kernel(points, self._points, self._length)
        explained = np.linalg.solve(self._factor, between.T)
        variance = np.maximum(self._variance - (explained**2).sum(axis=0), 1e-12)
        return self._mean + between @ self._weights, np.sqrt(variance)

    def expected_improvement(self, points: Floats, best: float) -> Floats:
        """How much more than `best` is to be expected there, counting what is less as nothing."""
        means, deviations = self.predict(points)
        gains = (means - best) / deviations
        densities = np.exp(-(gains**2) / 2) / math.sqrt(2 * math.pi)
        below = np.array([0.5 * (1 + math.erf(gain / math.sqrt(2))) for gain in gains.tolist()])
        improvement: Floats = deviations * (gains * below + densities)
        return improvement
