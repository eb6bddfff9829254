"""What a draft model that computes in the executor says with a step's result."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

_NONE = np.zeros(0, np.int32)


class Proposals(NamedTuple):
    """The proposals of a draft model that computes in the executor: `counts[i]` tokens that may follow at
    `positions[i]` of `rows[i]`; `tokens` is their concatenation. They took `seconds`, beside the step's own time, in
    so many `passes` through the model, the first of which computed `first` tokens."""

    rows: NDArray[np.int32] = _NONE
    positions: NDArray[np.int32] = _NONE
    counts: NDArray[np.int32] = _NONE
    tokens: NDArray[np.int32] = _NONE
    seconds: float = 0.0
    passes: int = 0
    first: int = 0


NO_PROPOSALS = Proposals()


def proposals_of(guesses: Sequence[tuple[int, int, list[int]]], seconds: float, passes: int, first: int) -> Proposals:
    """Proposals out of (row, position, tokens)."""
    return Proposals(
        np.array([row for row, _, _ in guesses], np.int32),
        np.array([position for _, position, _ in guesses], np.int32),
        np.array([len(tokens) for _, _, tokens in guesses], np.int32),
        np.array([token for _, _, tokens in guesses for token in tokens], np.int32),
        seconds,
        passes,
        first,
    )
