"""A request of a simulated load, and what became of it. Knows no engine."""

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from ...core.retention import Retention, RetentionRange
from ...scheduler.plan import IntArray

FIRST_TEXT = -(1 << 31)
"""Conversations are texts of one token each, from here on."""
MOST_TEXTS = 1 << 30
_PRIORITY = 50
"""The priority of what sessions retain."""


class SimulatedRequest(NamedTuple):
    """A request that comes at a time, for so many new tokens. Times are in seconds."""

    at: float
    prompt: int
    """Its tokens."""
    new: int
    """Tokens that it asks for."""
    target_ttft: float | None = None
    target_itl: float | None = None
    tenant: str = ""
    weight: float = 1.0
    priority: int = 0
    shared: int = 0
    """Tokens at the beginning of its prompt that are those of all requests of this tenant with the same `prefix`."""
    prefix: int = 0
    session: int = 0
    """The requests of a session, counted from 1, come one after the other. 0: it is of none."""
    conversation: int = 0
    """Of a session: the text that its prompt and its answer are a beginning of, beyond the shared tokens."""
    pause: float = 0.0
    """Of a session: seconds that it comes at the earliest after the answer to the one before."""

    retained: float = 0.0
    """Of a session: seconds that its conversation's cache is to be retained after the answer; 0: it asks for none."""
    last: bool = False
    """Whether it is the last of its conversation, which is then released."""

    @property
    def retention(self) -> Retention | None:
        if not (self.session and self.retained):
            return None
        return Retention(str(self.conversation), (RetentionRange(priority=_PRIORITY, seconds=self.retained),))

    def tokens(self, key: int) -> IntArray:
        """Token ids of the prompt, which beyond the shared ones no other request has, but for those of its
        conversation; `key` tells them apart."""
        ids = np.full(self.prompt, FIRST_TEXT + self.conversation if self.session else 2 * key + 1, np.int32)
        ids[: self.shared] = 2 * self.prefix
        return ids


@dataclass(slots=True)
class SimulatedResult:
    """What became of a request: the times of its tokens in seconds from the beginning, how many of its prompt were
    `cached`, and why it was `refused`, if it was."""

    arrival: SimulatedRequest
    tokens: list[float] = field(default_factory=list)
    cached: int = 0
    refused: str = ""

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.arrival.at

    def gaps(self, begin: float, end: float) -> list[float]:
        """Seconds between tokens, of those that came from `begin` to `end`."""
        return [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False) if begin < b <= end]
