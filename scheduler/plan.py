"""What the scheduler tells an executor to do in one step, and what comes back. Both are diffs."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int32]


class RowSampling(NamedTuple):
    """How one row's tokens are chosen, every default resolved.

    `temperature` 0 is greedy; `top_k` 0 and `top_p` 1 are off. The token at absolute position p of choice c
    depends on the logits and on (seed, c, p) alone.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    choice: int = 0


class NewSequence(NamedTuple):
    """A sequence that enters a row: all tokens known so far, of which the first `computed` are in its blocks."""

    row: int
    tokens: IntArray
    computed: int
    sampling: RowSampling


class StepPlan(NamedTuple):
    """One step, as the difference from the step before. R rows run, in this order.

    An executor processes plans in the order of `step`, and within one: `closed`, `new`, `copies`, `appended`,
    then the rows. It keeps per row the token ids (sampled ones included, so that a row may be scheduled again
    before the host has seen its last token) and the append-only block table.
    """

    step: int
    rows: IntArray
    """[R] row of each running sequence; distinct."""
    starts: IntArray
    """[R] position of the first token to compute."""
    counts: IntArray
    """[R] tokens to compute, at least 1."""
    samples: NDArray[np.bool_]
    """[R] whether the row's last computed token is the newest known one, so that a next token is sampled."""
    appended: IntArray
    """[A, 2] (row, block id) pairs to append to block tables, in order."""
    new: tuple[NewSequence, ...]
    closed: IntArray
    """[C] rows whose sequence has left since the last plan."""
    copies: IntArray
    """[K, 2] (from, to) block moves; none so far."""

    @property
    def tokens(self) -> int:
        """Tokens computed by this step, over all rows."""
        return int(self.counts.sum())


class StepResult(NamedTuple):
    """The tokens a step sampled, ragged: `counts[i]` tokens (0 to k) for `rows[i]`, which begin at position
    `offsets[i]` of the sequence; `tokens` is their concatenation."""

    step: int
    rows: IntArray
    offsets: IntArray
    counts: IntArray
    tokens: IntArray


class StepUpdates(NamedTuple):
    """What applying a result meant to the outside, by sequence key.

    `started`: (key, prompt tokens found in the prefix cache) of sequences first admitted since the last
    updates. `keys[i]` got `counts[i]` of the concatenated `tokens`. `finished`: (key, finish reason).
    """

    keys: list[int]
    counts: list[int]
    tokens: list[int]
    started: list[tuple[int, int]]
    finished: list[tuple[int, str]]
