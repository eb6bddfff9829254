"""Drafts what followed when a sequence last had the tokens that it ends with, as in quotes, edits, lists and code.

After vLLM's method of the same name, and Saxena, "Prompt Lookup Decoding" (2023).
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

import numpy as np
from numpy.typing import NDArray

from ...scheduler.drafts.speculation import DraftRequest
from ...scheduler.plan import IntArray

LOOKS = 16
"""The latest places that are compared for the longest match."""

_FACTOR, _WORD = 0x9E3779B97F4A7C15, (1 << 64) - 1
_STATE = "ngram"


class NgramDrafter:
    """A `Drafter` for sequences that end with `shortest` to `longest` tokens they had before. The longest match counts,
    and of equal ones the latest."""

    def __init__(self, shortest: int, longest: int) -> None:
        self._shortest, self._longest = shortest, longest

    def propose(self, requests: Sequence[DraftRequest]) -> list[list[int]]:
        return [self._propose_one(request) for request in requests]

    def _propose_one(self, request: DraftRequest) -> list[int]:
        index = request.state.get(_STATE)
        if index is None:
            index = request.state[_STATE] = NgramIndex(request.prompt, self._shortest)
        index.extend(request.outputs[len(index.tokens) - len(request.prompt) :])
        place = index.find(self._longest)
        return [] if place is None else index.continuation(place, request.k)


class NgramIndex:
    """A sequence's `tokens`, and the places of each `n` consecutive ones. A place is the position of the token after
    them, so the end of the sequence is none."""

    def __init__(self, prompt: IntArray, n: int) -> None:
        self._n = n
        self.tokens: list[int] = prompt.tolist()
        keys, places = _keys(prompt, n)[:-1], range(n, len(prompt))
        self._latest = dict(zip(keys.tolist(), places, strict=True))
        self._before = [-1] * min(n, len(prompt)) + _previous(keys, n).tolist()

    def extend(self, outputs: Iterable[int]) -> None:
        for token in outputs:
            place = len(self.tokens)
            self._before.append(-1)
            if place >= self._n:
                key = self._last_key()
                self._before[place] = self._latest.get(key, -1)
                self._latest[key] = place
            self.tokens.append(token)

    def _last_key(self) -> int:
        key = 0
        for token in self.tokens[-self._n :]:
            key = (key * _FACTOR + token + 1) & _WORD
        return key

    def places(self) -> Iterator[int]:
        """The places after the `n` tokens that the sequence ends with, the latest first."""
        place = self._latest.get(self._last_key(), -1) if len(self.tokens) > self._n else -1
        while place >= 0:
            yield place
            place = self._before[place]

    def find(self, longest: int) -> int | None:
        """The place after the longest match of the sequence's end, `n` to `longest` tokens, among the LOOKS latest."""
        best, length = None, self._n - 1
        for place in islice(self.places(), LOOKS):
            matched = self._matched(place, longest)
            if matched > length:
                best, length = place, matched
            if length == longest:
                break
        return best

    def _matched(self, place: int, longest: int) -> int:
        """How many tokens before `place` are those that the sequence ends with."""
        tokens, end = self.tokens, len(self.tokens)
        for length in range(min(longest, place)):
            if tokens[place - 1 - length] != tokens[end - 1 - length]:
                return length
        return min(longest, place)

    def continuation(self, place: int, k: int) -> list[int]:
        """The `k` tokens from `place` on, as a repetition where the sequence ends before."""
        following = self.tokens[place : place + k]
        return [following[at % len(following)] for at in range(k)]


def _keys(tokens: IntArray, n: int) -> NDArray[np.uint64]:
    """A hash for each `n` consecutive tokens, modulo 2^64; different tokens may have equal ones."""
    keys = np.zeros(max(len(tokens) - n + 1, 0), np.uint64)
    for at in range(n):
        keys = keys * np.uint64(_FACTOR) + tokens[at : at + len(keys)].astype(np.uint64) + np.uint64(1)
    return keys


def _previous(keys: NDArray[np.uint64], n: int) -> NDArray[np.int64]:
    """For each key the place of the previous equal one, -1 for the first; the place of keys[i] is i + n."""
    order = np.argsort(keys, kind="stable")
    previous = np.full(len(keys), -1)
    same = keys[order[1:]] == keys[order[:-1]]
    previous[order[1:][same]] = order[:-1][same] + n
    return previous
