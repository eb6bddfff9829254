"""What a calibration learns of a model's matrices, and which of them stay at eight bits when the others go to four."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ..checkpoint.build_context import Int4Plan
from .int4 import dequantize_int4, quantize_int4

HIGHER_SHARE = 0.1
"""Of the numbers in layers, those that may stay at eight bits: a tenth makes the weights read a twelfth larger."""

_EXPERT = re.compile(r"\.experts\.\d+\.")


class _Watched(NamedTuple):
    """A matrix: some of its rows, the numbers in all of them, and the sum of squares of each of its inputs."""

    sample: Tensor
    numbers: int
    squares: Tensor


class Calibration:
    """Adds up the squares of what every product is given while the model computes, and makes some noisy: as noisy as
    four bits would. A `ProductObserver`."""

    def __init__(self) -> None:
        self._watched: dict[str, _Watched] = {}
        self._noise: dict[str, float] = {}
        self._generator: torch.Generator | None = None

    def watch(
        self, label: str, product: Callable[[Tensor], Tensor], outputs: int, sample: Tensor
    ) -> Callable[[Tensor], Tensor]:
        squares = torch.zeros(sample.shape[1], device=sample.device)
        self._watched[label] = _Watched(sample, outputs * sample.shape[1], squares)

        def observed(x: Tensor) -> Tensor:
            out = product(x)
            if label in self._noise:
                noise = torch.randn(out.shape, generator=self._generator).to(out)
                return out + noise * (out.float().square().mean() * self._noise[label]).sqrt().to(out.dtype)
            squares.add_(x.float().square().sum(0))
            return out

        return observed

    @property
    def units(self) -> Mapping[str, list[str]]:
        """The labels of matrices that are judged together: one each, but all experts of a layer."""
        found = defaultdict(list)
        for label in self._watched:
            found[_EXPERT.sub(".experts.", label)].append(label)
        return found

    def make_noisy(self, unit: str) -> None:
        """Until the next call, what the matrices of `unit` return has the noise of four bits."""
        self._noise = {label: _noise_share(self._watched[label]) for label in self.units[unit]}
        self._generator = torch.Generator().manual_seed(0)

    def plan(self, costs: Mapping[str, float]) -> Int4Plan:
        """`costs`: what the noise of each unit does to the model. Those that cost most for their size stay higher, as
        many as HIGHER_SHARE allows."""
        sizes = {unit: sum(self._watched[label].numbers for label in labels) for unit, labels in self.units.items()}
        left, higher = HIGHER_SHARE * sum(sizes.values()), []
        for unit in sorted(costs, key=lambda unit: -costs[unit] / sizes[unit]):
            if sizes[unit] <= left:
                higher += self.units[unit]
                left -= sizes[unit]
        squares = {label: _mean_squares(each) for label, each in self._watched.items()}
        return Int4Plan(squares, frozenset(higher))


def _mean_squares(matrix: _Watched) -> Tensor:
    """With a mean of one, and none at zero: an input that was silent for a few tokens need not stay so. Where nothing
    came, to an expert that no token chose, all are alike."""
    mean = matrix.squares.mean()
    return torch.ones_like(matrix.squares) if mean == 0 else (matrix.squares / mean).clamp_(min=1e-2)


def _noise_share(matrix: _Watched) -> float:
    """The part of its outputs' square that four bits turn into noise, if inputs do not depend on each other."""
    squares = _mean_squares(matrix)
    noise = dequantize_int4(quantize_int4(matrix.sample, squares)) - matrix.sample
    return float((noise.square() @ squares).sum() / (matrix.sample.square() @ squares).sum().clamp(min=1e-30))
