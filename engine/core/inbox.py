"""Messages on their way into the step loop: prepared in the thread that brings them, handed out between steps.

Knows nothing of steps or sockets, and of the running sequences only whether there are any.
"""

import time
from collections.abc import Callable
from math import inf
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeAlias

import numpy as np

from ...kvcache.manager import KVCacheManager
from ...scheduler.sequence import SequenceRequest
from .messages import AbortRequests, AddRequest, Shutdown, ToCore

IDLE_SECONDS = 1.0
"""An idle loop turns, and tells so, at least this often."""


class NewRequest(NamedTuple):
    """A sequence to run, and its deadline by the inbox's clock; None is no limit."""

    request: SequenceRequest
    deadline: float | None


InboxItem: TypeAlias = NewRequest | AbortRequests | Shutdown | BaseException


class Inbox:
    """`accept` and `fail` are for any thread, `take_all` for the loop's. `clock`: seconds, for timeouts."""

    def __init__(self, cache: KVCacheManager, clock: Callable[[], float] = time.monotonic) -> None:
        self._cache = cache
        self._clock = clock
        self._queue: SimpleQueue[InboxItem] = SimpleQueue()

    def accept(self, message: ToCore) -> None:
        """Take a message. Converting and hashing a prompt happens here, in the caller's thread, and not in the step;
        lengths are the scheduler's to judge."""
        if not isinstance(message, AddRequest):
            self._queue.put(message)
            return
        deadline = self._clock() + message.timeout if message.timeout > 0 else None
        prompt = np.array(message.prompt, dtype=np.int32)
        extras = (message.adapter, message.tenant, message.salt)
        request = SequenceRequest(
            key=message.key,
            prompt=prompt,
            max_tokens=message.max_tokens,
            hashes=self._cache.digest(prompt, extras),
            sampling=message.sampling,
            stop_token_ids=frozenset(message.stop_token_ids),
            priority=message.priority,
            tenant=message.tenant,
            weight=message.weight,
            extras=extras,
        )
        self._queue.put(NewRequest(request, deadline))

    def fail(self, error: BaseException) -> None:
        """Let the loop end with this error."""
        self._queue.put(error)

    def take_all(self, busy: bool) -> list[InboxItem]:
        """Everything that has come. Unless the loop is `busy` it waits for the first, IDLE_SECONDS at most."""
        if busy and self._queue.empty():
            return []
        try:
            found = [self._queue.get(timeout=IDLE_SECONDS)]
        except Empty:
            return []
        while not self._queue.empty():
            found.append(self._queue.get_nowait())
        return found


class Deadlines:
    """A deadline per key, in seconds of the caller's clock; looking costs nothing while none has passed."""

    def __init__(self) -> None:
        self._of: dict[int, float] = {}
        self._earliest = inf  # or earlier, where its key was discarded

    def __len__(self) -> int:
        return len(self._of)

    def set(self, key: int, deadline: float) -> None:
        self._of[key] = deadline
        self._earliest = min(self._earliest, deadline)

    def discard(self, key: int) -> None:
        """The key has ended; unknown ones are ignored."""
        self._of.pop(key, None)

    def pop_expired(self, now: float) -> list[int]:
        """Remove the keys whose deadline has passed, the earliest first."""
        if now < self._earliest:
            return []
        passed = sorted((deadline, key) for key, deadline in self._of.items() if deadline <= now)
        for _, key in passed:
            del self._of[key]
        self._earliest = min(self._of.values(), default=inf)
        return [key for _, key in passed]
