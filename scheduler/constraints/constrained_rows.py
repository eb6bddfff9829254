"""Rows whose tokens the host follows, and the tokens that it forces: they are known without having been sampled.

Knows nothing of grammars: engines do.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ...core.logprobs import Logprobs
from ..plan import NO_TOKENS, IntArray, StepResult

ROWS_PER_FORCED_TOKEN = 16
"""One of so many decoding rows may compute a token that no step had to sample: the step of all takes longer by it."""


class ForcedTokens(NamedTuple):
    """What the host makes of the token that a constrained row sampled: `tokens` that follow it without being sampled,
    and whether the sequence `ends` with them."""

    tokens: Sequence[int] = ()
    ends: bool = False


def with_forced_tokens(result: StepResult, forced: Mapping[int, ForcedTokens]) -> StepResult:
    """The result with what follows in these rows behind the sampled tokens. They have no log-probabilities."""
    tokens: list[int] = []
    logprobs: list[Logprobs | None] = []
    follows = [forced[row].tokens if row in forced else () for row in result.rows.tolist()]
    first = 0
    for count, forced_tokens in zip(result.counts.tolist(), follows, strict=True):
        tokens += [*result.tokens[first : first + count].tolist(), *forced_tokens]
        logprobs += [*result.logprobs[first : first + count], *[None] * len(forced_tokens)]
        first += count
    numbers = np.array([len(forced_tokens) for forced_tokens in follows], np.int32)
    return result._replace(
        counts=result.counts + numbers,
        tokens=np.array(tokens, np.int32),
        logprobs=logprobs if result.logprobs else (),
        forced=numbers,
        ending=frozenset(row for row, following in forced.items() if following.ends),
    )


class ConstrainedRows:
    """Constrained rows, and forced tokens that no plan has had yet."""

    def __init__(self) -> None:
        self.keys: dict[int, int] = {}
        """The keys of constrained sequences, by the row they hold or leave; `RunningSet` fills it."""
        self._forced: list[tuple[int, int, int]] = []  # (row, position, token)

    def stop(self, row: int) -> None:
        """No plan will have the row again in this stay."""
        self._forced = [forced for forced in self._forced if forced[0] != row]

    def limit_forced(self, counts: IntArray, decoding: Iterable[int]) -> None:
        """Let constrained ones of the `decoding` rows, the most senior first, compute few forced tokens where others
        wait for the step. `counts`: the tokens that each row computes, which may become fewer."""
        rows = [*decoding]
        if all(row in self.keys for row in rows):
            return
        free = max(len(rows) // ROWS_PER_FORCED_TOKEN, 1)
        forced = counts[rows] - 1
        counts[rows] = 1 + np.clip(free - np.cumsum(forced) + forced, 0, forced)

    def note_forced(self, result: StepResult, known: IntArray, running: NDArray[np.bool_]) -> None:
        """The forced tokens of a result are known: of rows that go on, the next plan has them."""
        ends = np.cumsum(result.counts).tolist()
        for row, number, end in zip(result.rows.tolist(), result.forced.tolist(), ends, strict=True):
            if running[row]:
                tokens = result.tokens[end - number : end].tolist()
                places = enumerate(tokens, int(known[row]) - number)
                self._forced += [(row, position, token) for position, token in places]

    def take_forced(self) -> IntArray:
        """The forced tokens of the plan in the making, as `StepPlan.forced`."""
        if not self._forced:
            return NO_TOKENS
        forced: IntArray = np.array(self._forced, np.int32)
        self._forced.clear()
        return forced

    def check_integrity(self, keys: Mapping[int, int], running: NDArray[np.bool_]) -> None:
        """Raises `AssertionError` where these are not the `keys` of constrained rows, or a token is forced in vain."""
        assert self.keys == keys, "a constrained row is not followed"
        assert all(row in self.keys and running[row] for row, _, _ in self._forced), "a forced token without a row"
