"""Who may stand in line: requests and prompt tokens that wait, counted, and their limits. Knows nothing of engines."""

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from ...core.errors import InvalidArgument, QueueFull

_RETRY_SECONDS = (1.0, 60.0)
"""Shortest and longest wait advised to a request that found the queue full."""


class QueueLimits(NamedTuple):
    """How many requests may wait, and how many prompt tokens they may have together."""

    requests: int
    tokens: int


class QueueTicket(NamedTuple):
    """One place in line, to be given back when the request begins or is given up."""

    tenant: str
    tokens: int


@dataclass(slots=True)
class QueueDepth:
    """What was let in and has not begun."""

    requests: int = 0
    tokens: int = 0

    def add(self, requests: int, tokens: int) -> None:
        self.requests += requests
        self.tokens += tokens


class AdmissionControl:
    """Counts what waits, of all tenants and of each; every verb is O(1).

    The limits are for all tenants together. A full queue still lets in a tenant who has less in it than his even share,
    or a flood would keep everybody out: with that, never twice the limits wait.
    """

    def __init__(self, limits: QueueLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._starts: deque[float] = deque(maxlen=64)
        self._all = QueueDepth()
        self._tenants: dict[str, QueueDepth] = {}

    @property
    def requests(self) -> int:
        return self._all.requests

    @property
    def tokens(self) -> int:
        return self._all.tokens

    def check_size(self, prompts: int, choices: int, tokens: int = 0) -> None:
        """Whether so many answers, to prompts of so many tokens each, could wait together if nobody else did.

        Raises:
            InvalidArgument: no, so that another try is vain; the message says which limit.
        """
        requests, limit = self._limits
        field = "n" if choices > 1 else "prompt"
        if prompts * choices > requests:
            asked = f"{field}: {prompts} prompts with n {choices} ask for {prompts * choices} answers at once"
            raise InvalidArgument(f"{asked}, more than may wait: {requests} (max_queued_requests)", field=field)
        if choices > 1 and choices * tokens > limit:
            asked = f"{choices} answers to a prompt of {tokens} tokens"
            raise InvalidArgument(f"n: {asked} are more than may wait: {limit} (max_queued_tokens)", field="n")

    def check_capacity(self, tenant: str = "", tokens: int = 0) -> None:
        """Whether one more may wait, with so many prompt tokens. A prompt longer than the limit may wait alone.

        Raises:
            QueueFull: no; the message says which limit.
        """
        own, everybody, (requests, limit) = self._tenants.get(tenant, QueueDepth()), self._all, self._limits
        tenants = len(self._tenants) + (tenant not in self._tenants)
        if everybody.requests >= requests and own.requests >= max(1, requests // tenants):
            raise self._full("requests", f"{everybody.requests} requests are waiting already (max_queued_requests)")
        if own.tokens and everybody.tokens + tokens > limit and own.tokens + tokens > limit // tenants:
            waiting = f"{everybody.tokens} prompt tokens are waiting already and this prompt has {tokens}"
            raise self._full("tokens", f"{waiting}: more than {limit} (max_queued_tokens)")

    def issue_ticket(self, tenant: str = "", tokens: int = 0) -> QueueTicket:
        self._all.add(1, tokens)
        self._tenants.setdefault(tenant, QueueDepth()).add(1, tokens)
        return QueueTicket(tenant, tokens)

    def return_ticket(self, place: QueueTicket) -> None:
        self._all.add(-1, -place.tokens)
        own = self._tenants[place.tenant]
        own.add(-1, -place.tokens)
        if not own.requests:
            del self._tenants[place.tenant]

    def record_start(self) -> None:
        """One that waited has begun now: the pace that `retry_after` builds on."""
        self._starts.append(self._clock())

    def _full(self, limit: Literal["requests", "tokens"], message: str) -> QueueFull:
        return QueueFull(message, retry_after=self.retry_after(), limit=limit)

    def retry_after(self) -> float:
        """Seconds after which, at the recent pace, everything that waits now has started."""
        shortest, longest = _RETRY_SECONDS
        if len(self._starts) < 2:
            return shortest
        pace = (self._clock() - self._starts[0]) / len(self._starts)
        return min(longest, max(shortest, self.requests * pace))
