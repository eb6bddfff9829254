"""Dynamic time warping of tokens along a sound, and what smooths their attention before it."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

_BOTH, _DOWN, _RIGHT = range(3)
"""The steps of a path: to the next token and row, to the next token, to the next row."""


def median_filter(values: Tensor, width: int) -> Tensor:
    """The median of each number and its neighbours in a line, `width` together, of values [lines, numbers]; lines are
    mirrored at their ends, and those of no more numbers than half of `width` left as they are."""
    half, numbers = width // 2, values.shape[1]
    if numbers <= half:
        return values
    padded = F.pad(values, (half, half), mode="reflect")
    lanes = [padded[:, first : first + numbers] for first in range(width)]
    for turn in range(width):  # sorts the lanes
        for low in range(turn % 2, width - 1, 2):
            pair = lanes[low], lanes[low + 1]
            lanes[low : low + 2] = torch.minimum(*pair), torch.maximum(*pair)
    return lanes[half]


def align_by_warping(attention: Sequence[NDArray[np.float32]]) -> list[NDArray[np.int64]]:
    """The row at which each token begins, on the path from the first token and row to the last ones along which the sum
    of `attention` [tokens, rows] is largest. Where two ways are as good it goes to the next row."""
    return [_begins(_steps(matrix)) for matrix in attention]


def _steps(attention: NDArray[np.float32]) -> NDArray[np.int8]:
    """The last step of the best path to each place, [tokens + rows - 1, tokens]: by diagonals, since the places of one
    depend on the two before it alone. Place (token, row) stands at [token + row, token]."""
    tokens, rows = attention.shape
    diagonals = tokens + rows - 1
    costs = np.full((diagonals, tokens), np.inf)
    for token in range(tokens):
        costs[token : token + rows, token] = -np.nan_to_num(attention[token])
    steps = np.empty((diagonals, tokens), np.int8)
    # Sums along the paths to the places of the last two diagonals, behind one that no path comes from.
    before = np.full(tokens + 1, np.inf, np.float32)
    last = before.copy()
    before[0] = 0  # but for the first
    for diagonal in range(diagonals):
        both, down, right = before[:-1], last[:-1], last[1:]
        goes_both = (both < down) & (both < right)
        goes_down = (down < both) & (down < right)
        steps[diagonal] = np.where(goes_both, _BOTH, np.where(goes_down, _DOWN, _RIGHT))
        best = np.where(goes_both, both, np.where(goes_down, down, right))
        before, last = last, np.full(tokens + 1, np.inf, np.float32)
        last[1:] = best + costs[diagonal]
    return steps


def _begins(steps: NDArray[np.int8]) -> NDArray[np.int64]:
    """The first row of each token on the path to the last place."""
    diagonals, tokens = steps.shape
    begins = np.zeros(tokens, np.int64)
    token, row = tokens - 1, diagonals - tokens
    while token:
        step = steps[token + row, token]
        if step != _RIGHT:
            begins[token] = row
            token -= 1
        if step != _DOWN:
            row -= 1
    return begins
