"""Natural logarithms of the probabilities that a model gave tokens, before penalties and temperature."""

from collections.abc import Callable
from typing import Any, NamedTuple, Self, TypeVar, final

import msgspec
import numpy as np
import orjson
from numpy.typing import NDArray

MAX_LOGPROBS = 20
"""The most likeliest tokens that a request may ask for beside each token."""

_LEAST = -9999.0
"""The log-probability of an impossible token: JSON has no infinity."""


class Logprobs(msgspec.Struct, array_like=True, frozen=True, gc=False):
    """Logprobs of one generated token and of the likeliest tokens `ids`, in descending order; behind them of those that
    were asked for by id. `rank` is as in `RankedLogprobs`; 0 if unknown."""

    chosen: float
    ids: list[int]
    values: list[float]
    rank: int = 0

    def finite(self) -> Self:
        """These with the least finite number in the place of minus infinity."""
        if self.chosen + sum(self.values) > _LEAST:  # none is above 0
            return self
        chosen, *values = (value if value > _LEAST else _LEAST for value in (self.chosen, *self.values))
        return msgspec.structs.replace(self, chosen=chosen, values=values)


class RankedLogprobs(NamedTuple):
    """Logprobs of one token of a prompt. The likeliest token in its place has rank 1."""

    logprobs: Logprobs
    rank: int


class PromptLogprobs(NamedTuple):
    """Logprobs of T consecutive tokens of a prompt from position `start` on, and of the `top` likeliest tokens in each
    place.

    The columns travel as bytes: `chosen` float32 [T], `ranks` int32 [T], `ids` int32 and `values` float32 [T, top].
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
        start: int,
        chosen: NDArray[np.float32],
        ranks: NDArray[np.int32],
        ids: NDArray[np.int32],
        values: NDArray[np.float32],
    ) -> Self:
        """Columns of shapes [T], [T], [T, top] and [T, top]."""
        return cls(start, ids.shape[1], *(column.tobytes() for column in (chosen, ranks, ids, values)))

    def __bool__(self) -> bool:
        return bool(self.chosen)

    @property
    def end(self) -> int:
        """The position after the last token's."""
        return self.start + len(self.chosen) // 4

    def from_position(self, position: int) -> Self:
        """The logprobs from `position` on, which is not before `start`."""
        skipped = 4 * (position - self.start)
        return self._replace(
            start=position,
            chosen=self.chosen[skipped:],
            ranks=self.ranks[skipped:],
            ids=self.ids[skipped * self.top :],
            values=self.values[skipped * self.top :],
        )

    def to_list(self) -> list[RankedLogprobs]:
        chosen = np.frombuffer(self.chosen, np.float32).tolist()
        ranks = np.frombuffer(self.ranks, np.int32).tolist()
        ids = np.frombuffer(self.ids, np.int32).reshape(len(chosen), self.top).tolist()
        values = np.frombuffer(self.values, np.float32).reshape(len(chosen), self.top).tolist()
        columns = zip(chosen, ids, values, ranks, strict=True)
        return [RankedLogprobs(Logprobs(own, top, theirs), rank) for own, top, theirs, rank in columns]


class TokenPiece(NamedTuple):
    """A token's text, in which an incomplete character shows as U+FFFD, and its bytes."""

    text: str
    data: bytes


T = TypeVar("T")


class _OfTokens(dict[int, T]):
    """What `make` makes of a token, once: half the cost of a `functools.cache`."""

    def __init__(self, make: Callable[[int], T]) -> None:
        super().__init__()
        self._make = make

    def __missing__(self, token: int) -> T:
        value = self[token] = self._make(token)
        return value


class TokenPieces:
    """The pieces of a vocabulary's tokens, and what is made of them again and again, by token id. `read` is called once
    for each."""

    def __init__(self, read: Callable[[int], TokenPiece]) -> None:
        piece = self.piece = _OfTokens(read).__getitem__
        self.text = _OfTokens(lambda token: piece(token).text).__getitem__
        self.entry = _OfTokens(lambda token: json_entry(*piece(token))).__getitem__


def json_entry(name: str, data: bytes) -> bytes:
    """A format of bytes: a token as a JSON object that lacks the value of its logprob."""
    text, numbers = orjson.dumps(name), orjson.dumps([*data])
    return b'{"token":%b,"logprob":%%b,"bytes":%b}' % (text.replace(b"%", b"%%"), numbers)


class LikelyToken(NamedTuple):
    id: int
    text: str
    data: bytes
    logprob: float


@final
class TokenLogprob(msgspec.Struct, frozen=True, gc=False):
    """A token and its `scores`, which are finite. Nothing is made of the likeliest tokens until it is wanted."""

    id: int
    scores: Logprobs
    pieces: TokenPieces
    width: int | None = None
    """The characters that it adds to the text, 0 for an incomplete one; None if as many as `text` has."""

    @property
    def text(self) -> str:
        return self.pieces.text(self.id)

    @property
    def logprob(self) -> float:
        return self.scores.chosen

    @property
    def top(self) -> tuple[LikelyToken, ...]:
        """The likeliest tokens in its place."""
        scored = zip(self.scores.ids, self.scores.values, strict=True)
        return tuple(LikelyToken(token, *self.pieces.piece(token), value) for token, value in scored)

    def by_id(self, rank: int = 0, most: int | None = None) -> dict[str, dict[str, Any]]:
        """vLLM's form: by its id the token itself, then the `most` likeliest. `rank`: the token's own, if known."""
        tokens: list[TokenLogprob | LikelyToken] = [self, *self.top[:most]]
        own = rank or self.scores.rank or None
        return {
            str(token.id): {"logprob": token.logprob, "rank": place or own, "decoded_token": token.text}
            for place, token in enumerate(tokens)
        }


class PromptToken(msgspec.Struct, frozen=True):
    """A token of the prompt. `rank` is as in `RankedLogprobs`, `width` as in `TokenLogprob`."""

    id: int
    text: str
    given: TokenLogprob | None = None
    """Its logprob; None for the first token."""
    rank: int = 0
    width: int | None = None
