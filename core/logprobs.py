"""Logarithms of probabilities: what a model itself gave tokens, before penalties and temperature.

Natural logarithms throughout. Knows nothing of who computes them.
"""

from typing import NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

MAX_LOGPROBS = 20
"""Likeliest tokens that may be asked for beside each one."""


class Logprobs(NamedTuple):
    """Of one generated token: `chosen` is its own; `ids` are the likeliest tokens, the likeliest first, and `values`
    theirs."""

    chosen: float
    ids: list[int]
    values: list[float]


class RankedLogprobs(NamedTuple):
    """Of one token of a prompt. `rank`: 1 if no token is likelier there, 2 if one is, and so on."""

    logprobs: Logprobs
    rank: int


class PromptLogprobs(NamedTuple):
    """Of T consecutive tokens of a prompt, from position `first` on; `most` likeliest ones are named beside each.

    Columns travel as bytes: `chosen` float32 [T], `ranks` int32 [T], `ids` int32 and `values` float32 [T, most].
    """

    start: int
    top: int
    chosen: bytes
    ranks: bytes
    ids: bytes
    values: bytes

    @classmethod
    def from_arrays(
        cls,
        first: int,
        chosen: NDArray[np.float32],
        ranks: NDArray[np.int32],
        ids: NDArray[np.int32],
        values: NDArray[np.float32],
    ) -> Self:
        """Of columns [T], [T], [T, most] and [T, most]."""
        columns = (column.tobytes() for column in (chosen, ranks, ids, values))
        return cls(first, ids.shape[1], *columns)

    def __bool__(self) -> bool:
        return bool(self.chosen)

    @property
    def end(self) -> int:
        """The position after the last token's."""
        return self.start + len(self.chosen) // 4

    def from_position(self, position: int) -> Self:
        """Those from `position` on, which is not before `first`."""
        skipped = 4 * (position - self.start)
        of_each = skipped * self.top
        return self._replace(
            start=position,
            chosen=self.chosen[skipped:],
            ranks=self.ranks[skipped:],
            ids=self.ids[of_each:],
            values=self.values[of_each:],
        )

    def to_list(self) -> list[RankedLogprobs]:
        """One after the other."""
        chosen, ranks = np.frombuffer(self.chosen, np.float32).tolist(), np.frombuffer(self.ranks, np.int32).tolist()
        ids = np.frombuffer(self.ids, np.int32).reshape(len(chosen), self.top).tolist()
        values = np.frombuffer(self.values, np.float32).reshape(len(chosen), self.top).tolist()
        columns = zip(chosen, ids, values, ranks, strict=True)
        return [RankedLogprobs(Logprobs(own, top, theirs), rank) for own, top, theirs, rank in columns]


class TokenLogprob(msgspec.Struct, frozen=True):
    """A token, and the natural logarithm of the probability that the model itself gave it.

    `text` is its own, where half a character shows as U+FFFD; `data` are its bytes. `top`: the likeliest tokens in its
    place, which have no `top`.
    """

    id: int
    text: str
    data: bytes
    logprob: float
    top: tuple["TokenLogprob", ...] = ()


class PromptToken(msgspec.Struct, frozen=True):
    """A token of the prompt. `given`: what the model gave it, nothing to the first; `rank`: see `RankedLogprobs`."""

    id: int
    text: str
    given: TokenLogprob | None = None
    rank: int = 0
