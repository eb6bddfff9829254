"""Who may stand in line: requests and prompt tokens that wait, counted, and their limits. Knows nothing of engines."""

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ..core.errors import QueueFull

_RETRY_SECONDS = (1.0, 60.0)
"""Shortest and longest wait advised to a request that found the queue full."""


class QueueLimits(NamedTuple):
    """How many requests may wait, and how many prompt tokens they may have together."""

    requests: int
    tokens: int


class Admission:
    """Counts what was let in and has not begun yet; every verb is O(1)."""

    def __init__(self, limits: QueueLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._starts: deque[float] = deque(maxlen=64)
        self.requests = 0
        self.tokens = 0

    def check(self, tokens: int = 0) -> None:
        """Whether one more may wait, with so many prompt tokens. A prompt longer than the limit may wait alone.

        Raises:
            QueueFull: no; the message says which limit.
        """
        requests, limit = self._limits
        if self.requests >= requests:
            raise self._full(f"{requests} requests are waiting already (max_queued_requests)")
        if self.tokens and self.tokens + tokens > limit:
            waiting = f"{self.tokens} prompt tokens are waiting already and this prompt has {tokens}"
            raise self._full(f"{waiting}: more than {limit} (max_queued_tokens)")

    def enter(self, tokens: int) -> None:
        self.requests += 1
        self.tokens += tokens

    def leave(self, tokens: int) -> None:
        """It began, or was given up."""
        self.requests -= 1
        self.tokens -= tokens

    def note_start(self) -> None:
        """One that waited has begun now: the pace that `retry_after` builds on."""
        self._starts.append(self._clock())

    def _full(self, message: str) -> QueueFull:
        return QueueFull(message, retry_after=self.retry_after())

    def retry_after(self) -> float:
        """Seconds after which, at the recent pace, everything that waits now has started."""
        shortest, longest = _RETRY_SECONDS
        if len(self._starts) < 2:
            return shortest
        pace = (self._clock() - self._starts[0]) / len(self._starts)
        return min(longest, max(shortest, self.requests * pace))
