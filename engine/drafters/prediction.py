"""Drafts a client's prediction of the answer (OpenAI's predicted outputs), which the text follows, leaves where it has
changes, and returns to.
"""

from collections import deque
from collections.abc import Sequence

import numpy as np

from ...scheduler.drafts.speculation import DraftRequest
from ...scheduler.plan import IntArray

_LONGEST = 16
"""The most tokens of a text's end by which its place is found again; two are the fewest."""

_PATIENCE, _PAUSE = 64, 8
"""Wrong tokens after which the place is searched only at every eighth, since that reads the whole prediction."""

_AHEAD, _BEHIND = 12, 4
"""The places with the last two tokens that are compared, after the last right token and before it."""

_STATE = "prediction"


class PredictionDrafter:
    """Drafts from a request's prediction while the text follows it."""

    def propose(self, requests: Sequence[DraftRequest]) -> list[Sequence[int]]:
        return [self._predicted(request) for request in requests]

    def _predicted(self, request: DraftRequest) -> Sequence[int]:
        if request.prediction is None:
            return ()
        follower = request.state.get(_STATE)
        if follower is None:
            follower = request.state[_STATE] = PredictionFollower(request.prediction)
        follower.extend(request.outputs[follower.followed :])
        expected: list[int] = follower.expected(request.k)
        return expected


class PredictionFollower:
    """The position of a text in `prediction`. `followed`: tokens of the text so far."""

    def __init__(self, prediction: Sequence[int] | IntArray) -> None:
        self._array: IntArray = np.asarray(prediction, np.int32)
        self._prediction: list[int] = self._array.tolist()
        self._place: int | None = 0  # of the token that likely comes next
        self._last_right = 0
        self._misses = 0
        self._tail: deque[int] = deque(maxlen=_LONGEST)
        self._had = bytearray(len(prediction))
        self.followed = 0

    @property
    def accepted(self) -> int:
        """Tokens of the prediction that the text has."""
        return sum(self._had)

    @property
    def rejected(self) -> int:
        """Tokens of the prediction that the text has not."""
        return len(self._had) - self.accepted

    def expected(self, most: int) -> list[int]:
        """The next tokens, at most `most`; none where the text has left the prediction."""
        return [] if self._place is None else self._prediction[self._place : self._place + most]

    def extend(self, tokens: Sequence[int]) -> None:
        """Follow the next tokens of the text."""
        for token in tokens:
            self._tail.append(token)
            self.followed += 1
            place = self._place
            if place is not None and self._prediction[place : place + 1] == [token]:
                self._stand_at(place + 1, 1)
            else:
                self._miss()

    def _miss(self) -> None:
        self._misses += 1
        match = self._find()
        if match is not None:
            self._stand_at(*match)
        elif self._misses == 1 and self._place is not None:
            self._place += 1  # as if one token was replaced
        else:
            self._place = None

    def _stand_at(self, place: int, matched: int) -> None:
        self._had[place - matched : place] = b"\1" * matched
        self._place = self._last_right = place
        self._misses = 0

    def _find(self) -> tuple[int, int] | None:
        """The place after the longest match of the text's end, and its length; of equal ones the first after the last
        right token."""
        if len(self._tail) < 2 or (self._misses > _PATIENCE and self._misses % _PAUSE):
            return None
        pairs = (self._array[:-1] == self._tail[-2]) & (self._array[1:] == self._tail[-1])
        places = np.flatnonzero(pairs) + 2
        middle = int(np.searchsorted(places, self._last_right))
        nearby = [*places[middle : middle + _AHEAD], *places[max(middle - _BEHIND, 0) : middle][::-1]]
        best: tuple[int, int] | None = None
        for place in map(int, nearby):
            length = self._matched(place)
            if best is None or length > best[1]:
                best = place, length
        return best

    def _matched(self, place: int) -> int:
        """How many tokens before `place` are those that the text ends with."""
        most = min(len(self._tail), place)
        pairs = ((self._prediction[place - 1 - at], self._tail[-1 - at]) for at in range(most))
        return next((at for at, (predicted, token) in enumerate(pairs) if predicted != token), most)
