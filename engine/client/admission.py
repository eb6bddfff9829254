"""Admission control: counts the requests and prompt tokens that wait, and refuses more than their limits.

Knows nothing of engines.
"""

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self

from ...core.errors import InvalidArgument, QueueFull

_BACKGROUND_SHARE = 0.75
"""Of rows and of the cache's blocks: more than that requests in the background do not begin to take."""

_RETRY_SECONDS = (1.0, 60.0)
"""Shortest and longest wait advised to a request that found the queue full."""


class QueueLimits(NamedTuple):
    """How many requests may wait, and how many prompt tokens they may have together."""

    requests: int
    tokens: int


@dataclass(slots=True)
class QueueDepth:
    """The requests that were admitted and have not started, and their prompt tokens."""

    requests: int = 0
    tokens: int = 0

    def add(self, requests: int, tokens: int) -> None:
        self.requests += requests
        self.tokens += tokens


class AdmissionControl:
    """Counts the requests that wait, of all tenants (`waiting`) and of each; every method is O(1).

    The limits are for all tenants together. A full queue still admits a tenant who has less in it than an even share,
    or a flood would keep everybody out: with that, never twice the limits wait.
    """

    def __init__(self, limits: QueueLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._starts: deque[float] = deque(maxlen=64)
        self.waiting = QueueDepth()
        self._tenants: dict[str, QueueDepth] = {}

    def check_count(self, prompts: int, choices: int) -> None:
        """Raises `InvalidArgument` for a request of so many `prompts`, and `choices` answers to each, whose sequences
        could never wait together, so that another try is vain."""
        limit = self._limits.requests
        if prompts * choices > limit:
            field = "n" if choices > 1 else "prompt"
            asked = f"{field}: {prompts} prompts with n {choices} ask for {prompts * choices} answers at once"
            raise InvalidArgument(f"{asked}, more than may wait: {limit} (max_queued_requests)", field=field)

    def admit(self, tenant: str = "", choices: int = 1) -> "QueueTicket":
        """A ticket for one sequence of a request that wants `choices` answers to its prompt.

        Raises:
            QueueFull: too many requests wait; the message names the limit.
        """
        limit, own = self._limits.requests, self._tenants.get(tenant, QueueDepth())
        tenants = len(self._tenants) + (tenant not in self._tenants)
        if self.waiting.requests >= limit and own.requests >= max(1, limit // tenants):
            raise self._full("requests", f"{self.waiting.requests} requests are waiting already (max_queued_requests)")
        self._add(tenant, 1, 0)
        return QueueTicket(self, tenant, choices)

    def add_prompt(self, ticket: "QueueTicket", tokens: int) -> None:
        """Count the prompt of an admitted sequence. One that is longer than the limit may wait alone.

        Raises:
            InvalidArgument: the prompts of all its choices could never wait together.
            QueueFull: too many tokens wait; the message names the limit.
        """
        limit, own = self._limits.tokens, self._tenants[ticket.tenant]
        if ticket.choices > 1 and ticket.choices * tokens > limit:
            asked = f"{ticket.choices} answers to a prompt of {tokens} tokens"
            raise InvalidArgument(f"n: {asked} are more than may wait: {limit} (max_queued_tokens)", field="n")
        if own.tokens and self.waiting.tokens + tokens > limit and own.tokens + tokens > limit // len(self._tenants):
            waiting = f"{self.waiting.tokens} prompt tokens are waiting already and this prompt has {tokens}"
            raise self._full("tokens", f"{waiting}: more than {limit} (max_queued_tokens)")
        self._add(ticket.tenant, 0, tokens)
        ticket.tokens += tokens

    def release(self, ticket: "QueueTicket", started: bool = False) -> None:
        """Take a sequence out of the counts. Those that `started` tell the pace that `retry_after` builds on."""
        self._add(ticket.tenant, -1, -ticket.tokens)
        if not self._tenants[ticket.tenant].requests:
            del self._tenants[ticket.tenant]
        if started:
            self._starts.append(self._clock())

    def _add(self, tenant: str, requests: int, tokens: int) -> None:
        self.waiting.add(requests, tokens)
        self._tenants.setdefault(tenant, QueueDepth()).add(requests, tokens)

    def _full(self, limit: Literal["requests", "tokens"], message: str) -> QueueFull:
        return QueueFull(message, retry_after=self.retry_after(), limit=limit)

    def retry_after(self) -> float:
        """Seconds after which, at the recent pace, every request that waits now has started."""
        shortest, longest = _RETRY_SECONDS
        if len(self._starts) < 2:
            return shortest
        pace = (self._clock() - self._starts[0]) / len(self._starts)
        return min(longest, max(shortest, self.waiting.requests * pace))


@dataclass(slots=True, eq=False)
class QueueTicket:
    """The place of one sequence among those that wait, held from before it is tokenized until the engine starts it or
    it is given up. As a context manager it is released at the end, at the latest."""

    admission: AdmissionControl
    tenant: str
    choices: int
    tokens: int = 0
    held: bool = True

    def serve(self, prompts: int, choices: int) -> None:
        """Make it that of a request which was not known when it was taken; raises as `AdmissionControl.check_count`."""
        self.admission.check_count(prompts, choices)
        self.choices = choices

    def release(self, started: bool = False) -> None:
        """May be called again."""
        if self.held:
            self.held = False
            self.admission.release(self, started)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def most_in_background(rows: int, limits: QueueLimits) -> int:
    """The sequences in the background that an engine of so many rows takes: the others find rows free, and room in the
    queue, whatever runs behind them."""
    return max(1, min(int(rows * _BACKGROUND_SHARE), limits.requests // 2))


class BackgroundLimit:
    """Admits the sequences of requests whose answers no client waits for, each from its beginning to its end: `count`
    of them now, of which there may be `most`. They do not count among those that wait, so no client is refused for
    them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0
        self._admission = AdmissionControl(QueueLimits(sys.maxsize, sys.maxsize))

    @contextmanager
    def admit(self, tenant: str, is_first: bool, cache: tuple[int, int]) -> Iterator[QueueTicket]:
        """Admit one sequence for the block; further ones of a request that `is_first` began always are. `cache`: tokens
        in the engine's cache, and how many fit.

        Raises:
            QueueFull: there are too many, or they would crowd the cache.
        """
        used, capacity = cache
        crowded = used > capacity * _BACKGROUND_SHARE
        if is_first and self.count and (self.count >= self.most or crowded):
            raise QueueFull("the engine has all the background work that it takes at a time", retry_after=1.0)
        self.count += 1
        try:
            with self._admission.admit(tenant) as ticket:
                yield ticket
        finally:
            self.count -= 1
