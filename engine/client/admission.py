"""Admission control: counts the requests and prompt tokens that wait, and refuses more than their limits.

Knows nothing of engines.
"""

import asyncio
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple, Self, TypeVar

from ...core.errors import InvalidArgument, QueueFull

T = TypeVar("T")

_BACKGROUND_SHARE = 0.75
"""The share of rows and of cache blocks in use up to which background requests begin."""

_RETRY_SECONDS = (1.0, 60.0)
"""The shortest and the longest wait advised to a request that found the queue full."""


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

    The limits hold for all tenants together. A full queue still admits a tenant with less than an even share in it, or
    one flood would keep everybody out; still, never twice the limits wait.
    """

    def __init__(self, limits: QueueLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._starts: deque[float] = deque(maxlen=64)
        self.waiting = QueueDepth()
        self._tenants: dict[str, QueueDepth] = {}
        self._turns = {"requests": asyncio.Lock(), "tokens": asyncio.Lock()}
        self._released = asyncio.Event()

    def check_count(self, prompts: int, choices: int) -> None:
        """Raises `InvalidArgument` for a request with so many `prompts`, and `choices` answers to each, that its
        sequences could never wait together."""
        limit = self._limits.requests
        if prompts * choices > limit:
            field = "n" if choices > 1 else "prompt"
            message = f"{field}: {prompts} prompts with n {choices} ask for {prompts * choices} answers at once"
            raise InvalidArgument(f"{message}, more than may wait: {limit} (max_queued_requests)", field=field)

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

    async def take_turn(self, limit: Literal["requests", "tokens"], take: Callable[[], T]) -> T:
        """What `take` gives when it finds the queue full no longer. Callers have their turns in the order in which they
        came, apart for each limit: those who wait for tokens have a place that others wait for."""
        async with self._turns[limit]:
            while True:
                try:
                    return take()
                except QueueFull:
                    self._released.clear()
                    await self._released.wait()

    def add_prompt(self, ticket: "QueueTicket", tokens: int) -> None:
        """Count the prompt of an admitted sequence, once. One that is longer than the limit may wait alone.

        Raises:
            InvalidArgument: the prompts of all its choices could never wait together.
            QueueFull: too many tokens wait; the message names the limit.
        """
        if ticket.tokens:
            return
        limit, own = self._limits.tokens, self._tenants[ticket.tenant]
        if ticket.choices > 1 and ticket.choices * tokens > limit:
            message = f"n: {ticket.choices} answers to a prompt of {tokens} tokens are more than may wait"
            raise InvalidArgument(f"{message}: {limit} (max_queued_tokens)", field="n")
        if own.tokens and self.waiting.tokens + tokens > limit and own.tokens + tokens > limit // len(self._tenants):
            waiting = f"{self.waiting.tokens} prompt tokens are waiting already and this prompt has {tokens}"
            raise self._full("tokens", f"{waiting}: more than {limit} (max_queued_tokens)")
        self._add(ticket.tenant, 0, tokens)
        ticket.tokens += tokens

    def release(self, ticket: "QueueTicket", started: bool = False) -> None:
        """Take a sequence out of the counts. `started` sequences set the pace of `retry_after`."""
        self._add(ticket.tenant, -1, -ticket.tokens)
        if not self._tenants[ticket.tenant].requests:
            del self._tenants[ticket.tenant]
        if started:
            self._starts.append(self._clock())
        self._released.set()

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
    """The place of one sequence among those that wait, from before it is tokenized until the engine starts it or it is
    given up. The end of its block releases it, too."""

    admission: AdmissionControl
    tenant: str
    choices: int
    tokens: int = 0
    held: bool = True

    def serve(self, prompts: int, choices: int) -> None:
        """Use a ticket that was taken before its request was known. Raises as `AdmissionControl.check_count`."""
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
    """The background sequences that an engine with so many rows takes: they leave rows, and room in the queue, free for
    others."""
    return max(1, min(int(rows * _BACKGROUND_SHARE), limits.requests // 2))


class BackgroundLimit:
    """Admits the sequences of background requests, each until its end: `count` are admitted now, and `most` may be.
    They do not count among those that wait, so no client is refused for them."""

    def __init__(self, most: int) -> None:
        self.most = most
        self.count = 0
        self._admission = AdmissionControl(QueueLimits(sys.maxsize, sys.maxsize))

    @contextmanager
    def admit(self, tenant: str, is_first: bool, cache: tuple[int, int]) -> Iterator[QueueTicket]:
        """Admit one sequence for the block; those after a request's first always are. `cache`: tokens in the engine's
        cache, and how many fit. Raises `QueueFull` for too many sequences or a crowded cache."""
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
