"""Drafts what mostly followed a text's end, earlier in the text or in answers served before.

After Oliaro et al., "SuffixDecoding" (2024), with the names of vLLM's method. Instead of suffix trees there are indexes
of pairs of tokens, and each step walks along the places that still match.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from ...scheduler.drafts.speculation import DraftRequest
from ...scheduler.plan import IntArray
from .ngram import NgramIndex

LOOKS = 32
"""The latest places that are followed."""

KEPT_TOKENS = 1 << 20
"""Tokens of the latest answers that are remembered."""

_PAIR = 2
_STATE = "suffix"
_NOTHING = -1
_MIX = 0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F


class SuffixDrafter:
    """Compares matches of up to `depth` tokens, in the sequence and in `remembered` answers of the same tenant. It
    drafts `factor` times as many tokens as match, while their probability is at least `least_probability`."""

    def __init__(
        self,
        depth: int = 24,
        remembered: int = 10_000,
        factor: float = 1.0,
        least_probability: float = 0.1,
        kept_tokens: int = KEPT_TOKENS,
    ) -> None:
        self._depth = depth
        self._factor = factor
        self._least = least_probability
        self._answers = ServedAnswers(kept_tokens, remembered) if remembered else None

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._propose_one(request) for request in requests]

    def finished(self, request: DraftRequest) -> None:
        """Remember an answer."""
        if self._answers is not None:
            self._answers.add(request.outputs, _owner(request))

    def _propose_one(self, request: DraftRequest) -> list[int]:
        followed = request.state.get(_STATE)
        if followed is None:
            followed = request.state[_STATE] = self._follow(request)
        own, matches = followed
        for token in request.outputs[len(own.tokens) - len(request.prompt) :]:
            own.append(token)
            for match in matches:
                match.extend(token, own.tokens)
        best = LikelyTokens([], 0.0)
        for match in matches:
            most = min(request.k, int(match.length * self._factor))
            likely = match.continuation(most, self._least)
            best = likely if likely.expected > best.expected else best
        return best.tokens

    def _follow(self, request: DraftRequest) -> tuple["OwnText", list["Match"]]:
        own = OwnText(request.prompt)
        texts: list[IndexedText] = [own]
        if self._answers is not None:
            texts.append(AnswersOf(self._answers, _owner(request)))
        matches = [Match(text, self._depth) for text in texts]
        for match in matches:
            match.find(own.tokens)
        return own, matches


def _owner(request: DraftRequest) -> int:
    return hash((request.tenant, request.extras))


class LikelyTokens(NamedTuple):
    """Tokens, and the expected number of right ones."""

    tokens: list[int]
    expected: float


class IndexedText(Protocol):
    """Tokens by place, and the places that follow two tokens."""

    def places(self, first: int, second: int) -> Iterator[int]:
        """The places after two tokens, the latest first; a token follows at each."""

    def token(self, place: int, drafted: Sequence[int] = ()) -> int:
        """The token at a place; _NOTHING where there is none (any more). `drafted` follows a sequence's own tokens."""


class OwnText:
    """A sequence's own tokens."""

    def __init__(self, prompt: IntArray) -> None:
        self._index = NgramIndex(prompt, _PAIR)
        self.tokens = self._index.tokens

    def append(self, token: int) -> None:
        """Add the next token."""
        self._index.extend((token,))

    def places(self, first: int, second: int) -> Iterator[int]:
        """See `IndexedText`; `first` and `second` are the last two tokens."""
        return self._index.places()

    def token(self, place: int, drafted: Sequence[int] = ()) -> int:
        """See `IndexedText`; by `drafted` a repetition goes on."""
        beyond = place - len(self.tokens)
        if beyond < 0:
            return self.tokens[place] if place >= 0 else _NOTHING
        return drafted[beyond] if beyond < len(drafted) else _NOTHING


class ServedAnswers:
    """The latest answers, at most `most`, in a ring of `size` tokens: place p is at p modulo `size`. By a hash of owner
    and pair, `_heads` has the latest place after the pair, and `_before` the one before each. Different pairs may share
    a hash, so tokens and owners are compared."""

    def __init__(self, size: int, most: int) -> None:
        self._size = size
        slots = 1 << (size - 1).bit_length()
        self._mask = slots - 1
        tokens, owners = np.zeros(size, np.int32), np.zeros(size, np.int64)
        before, heads = np.zeros(size, np.int64), np.zeros(slots, np.int64)
        self._arrays = tokens, owners, before, heads
        views = [array.data for array in self._arrays]  # faster for single numbers
        self._tokens, self._owners, self._before, self._heads = views
        self._begins: deque[int] = deque(maxlen=most)
        self._end = 1

    @property
    def oldest(self) -> int:
        """The oldest place that is remembered."""
        return max(self._end - self._size, self._begins[0]) if self._begins else self._end

    def add(self, answer: Sequence[int], owner: int) -> None:
        """Remember an answer in place of the oldest; of a very long one the end alone."""
        count = min(len(answer), self._size // 2)
        if count <= _PAIR:
            return
        text = np.array([*islice(answer, len(answer) - count, None), _NOTHING], np.int64)
        places = np.arange(self._end, self._end + count + 1)
        tokens, owners, before, heads = self._arrays
        at = places % self._size
        tokens[at] = text
        owners[at] = owner
        before[at] = 0
        slots = self._slots(text[:-3], text[1:-2], owner)
        following = places[_PAIR:-1]
        order = np.argsort(slots, kind="stable")
        same = slots[order[1:]] == slots[order[:-1]]
        earlier = heads[slots]
        earlier[order[1:][same]] = following[order[:-1][same]]
        before[at[_PAIR:-1]] = earlier
        heads[slots[order]] = following[order]
        self._begins.append(self._end)
        self._end += count + 1

    def _slots(self, first: NDArray[np.int64], second: NDArray[np.int64], owner: int) -> NDArray[np.int64]:
        mixed = (first.astype(np.uint64) + np.uint64(owner & (1 << 64) - 1)) * np.uint64(_MIX[0])
        mixed = (mixed + second.astype(np.uint64)) * np.uint64(_MIX[1])
        return (mixed >> np.uint64(32)).astype(np.int64) & self._mask

    def places(self, first: int, second: int, owner: int) -> Iterator[int]:
        word, size = (1 << 64) - 1, self._size
        mixed = ((first + owner) * _MIX[0] + second & word) * _MIX[1] & word
        place, oldest = self._heads[mixed >> 32 & self._mask], self.oldest
        while place >= oldest + _PAIR:
            last = self._tokens[(place - 1) % size]
            if last == second and self._tokens[(place - 2) % size] == first and self._owners[place % size] == owner:
                yield place
            place = self._before[place % size]

    def token(self, place: int, drafted: Sequence[int] = ()) -> int:
        return self._tokens[place % self._size] if self.oldest <= place < self._end else _NOTHING


class AnswersOf:
    """An `IndexedText`: the answers of one `owner`."""

    def __init__(self, answers: ServedAnswers, owner: int) -> None:
        self.token = answers.token
        self.places = partial(answers.places, owner=owner)


class Match:
    """The places in `text` after the longest match, of `length` tokens and at most `depth`, of a sequence's end. New
    places are found when the sequence has left all of these."""

    def __init__(self, text: IndexedText, depth: int) -> None:
        self._text, self._depth = text, depth
        self._places: list[int] = []
        self.length = 0

    def extend(self, token: int, tokens: list[int]) -> None:
        """Follow `token`, the last of `tokens`."""
        token_at = self._text.token
        following = [place + 1 for place in self._places if token_at(place) == token]
        self._places = [place for place in following if token_at(place) != _NOTHING]
        if self._places:
            self.length = min(self.length + 1, self._depth)
        else:
            self.find(tokens)

    def find(self, tokens: list[int]) -> None:
        """Find the places for the end of `tokens`."""
        self._places, self.length = [], 0
        if len(tokens) < _PAIR:
            return
        for place in islice(self._text.places(tokens[-2], tokens[-1]), LOOKS):
            length = self._matched(place, tokens)
            if length > self.length:
                self._places, self.length = [], length
            if length == self.length:
                self._places.append(place)

    def _matched(self, place: int, tokens: list[int]) -> int:
        token_at = self._text.token
        most = min(self._depth, len(tokens))
        for length in range(_PAIR, most):
            if token_at(place - 1 - length) != tokens[-1 - length]:
                return length
        return most

    def continuation(self, most: int, least_probability: float) -> LikelyTokens:
        """The likeliest `most` tokens; of equally likely ones the latest."""
        token_at = self._text.token
        places = self._places
        tokens: list[int] = []
        probability, expected = 1.0, 0.0
        for at in range(most):
            following = [token_at(place + at, tokens) for place in places]
            best = _most_frequent(following)
            probability *= following.count(best) / len(following) if following else 0.0
            if best == _NOTHING or probability < least_probability:
                break
            tokens.append(best)
            expected += probability
            if len(places) > 1:
                places = [place for place, token in zip(places, following, strict=True) if token == best]
        return LikelyTokens(tokens, expected)


def _most_frequent(tokens: Iterable[int]) -> int:
    """The most frequent token, of several the first; _NOTHING where there is none."""
    counts: dict[int, int] = {}
    for token in tokens:
        if token != _NOTHING:
            counts[token] = counts.get(token, 0) + 1
    return max(counts, key=counts.__getitem__) if counts else _NOTHING
