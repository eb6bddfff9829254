"""Messages on their way into the step loop: prepared in the thread that brings them, handed out between steps.

Knows nothing of steps or sockets, and of the running sequences only whether there are any.
"""

import time
from collections.abc import Callable
from heapq import heappop, heappush
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
        """Take a message. Converting and hashing a prompt happens here, in the caller's thread, and not in the step."""
        if not isinstance(message, AddRequest):
            self._queue.put(message)
            return
        deadline = self._clock() + message.timeout if message.timeout > 0 else None
        self._queue.put(NewRequest(to_sequence_request(message, self._cache), deadline))

    def fail(self, error: BaseException) -> None:
        """Let the loop end with this error."""
        self._queue.put(error)

    def take_all(self, busy: bool, on_idle: Callable[[], None]) -> list[InboxItem]:
        """Everything that has come. Unless the loop is `busy` it waits for the first; `on_idle` is called where none
        came for IDLE_SECONDS."""
        if busy and self._queue.empty():
            return []
        try:
            found = [self._queue.get(timeout=IDLE_SECONDS)]
        except Empty:
            on_idle()
            return []
        while not self._queue.empty():
            found.append(self._queue.get_nowait())
        return found


def to_sequence_request(add: AddRequest, cache: KVCacheManager) -> SequenceRequest:
    """The scheduler's form of a request, with block hashes; lengths are the scheduler's to judge."""
    prompt = np.array(add.prompt, dtype=np.int32)
    extras = (add.adapter, add.tenant, add.salt)
    return SequenceRequest(
        key=add.key,
        prompt=prompt,
        max_tokens=add.max_tokens,
        hashes=cache.digest(prompt, extras),
        sampling=add.sampling,
        stop_token_ids=frozenset(add.stop_token_ids),
        priority=add.priority,
        tenant=add.tenant,
        weight=add.weight,
        extras=extras,
    )


class Deadlines:
    """A deadline per key, in seconds of the caller's clock; looking costs nothing while none has passed."""

    def __init__(self) -> None:
        self._of: dict[int, float] = {}
        self._heap: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._of)

    def set(self, key: int, deadline: float) -> None:
        self._of[key] = deadline
        heappush(self._heap, (deadline, key))

    def discard(self, key: int) -> None:
        """The key has ended; unknown ones are ignored."""
        self._of.pop(key, None)
        if len(self._heap) > 2 * len(self._of) + 64:
            self._heap = sorted((deadline, key) for key, deadline in self._of.items())

    def pop_expired(self, now: float) -> list[int]:
        """Remove the keys whose deadline has passed."""
        passed: list[int] = []
        while self._heap and self._heap[0][0] <= now:
            deadline, key = heappop(self._heap)
            if self._of.get(key) == deadline:
                del self._of[key]
                passed.append(key)
        return passed
