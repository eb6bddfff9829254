"""What comes to the step loop: prepared in the thread that brings it, handed out between steps.

Knows nothing of steps, and of what runs only whether there is something.
"""

import time
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import NamedTuple, TypeAlias

from ...core.errors import InvalidArgument
from ...kvcache.manager import KVCacheManager
from ...scheduler.sequence import SequenceRequest
from .messages import AbortRequests, AddRequest, RequestRejected, Shutdown, ToCore
from .sequence_request import to_sequence_request

IDLE_SECONDS = 1.0
"""An idle loop turns, and tells so, at least this often."""


class ClientRejection(NamedTuple):
    client: int
    message: RequestRejected

    @classmethod
    def of(cls, client: int, key: int, error: InvalidArgument) -> "ClientRejection":
        """To the client's request `key`."""
        field = error.field or ""
        message = error.message if field in error.message else f"{field}: {error.message}"
        return cls(client, RequestRejected(key, message, field))


class NewRequest(NamedTuple):
    """A sequence to run, and until when; None is no limit."""

    request: SequenceRequest
    deadline: float | None


InboxItem: TypeAlias = NewRequest | AbortRequests | Shutdown | ClientRejection | BaseException


class Inbox:
    """`accept` and `fail` are for any thread, the rest for the loop's. `clock`: what timeouts are measured by, in
    seconds."""

    def __init__(self, vocab_size: int, cache: KVCacheManager, clock: Callable[[], float] = time.monotonic) -> None:
        self._vocab_size = vocab_size
        self._cache = cache
        self._clock = clock
        self._queue: SimpleQueue[InboxItem] = SimpleQueue()

    def accept(self, message: ToCore) -> None:
        """Take a message; what costs time happens here, in the caller's thread, and not in the step."""
        self._queue.put(self._prepared(message) if isinstance(message, AddRequest) else message)

    def fail(self, error: BaseException) -> None:
        """This ends the loop."""
        self._queue.put(error)

    def _prepared(self, add: AddRequest) -> NewRequest | ClientRejection:
        deadline = self._clock() + add.timeout if add.timeout > 0 else None
        try:
            return NewRequest(to_sequence_request(add, self._vocab_size, self._cache), deadline)
        except InvalidArgument as error:
            return ClientRejection.of(add.client, add.key, error)

    def take_all(self, busy: bool, on_idle: Callable[[], None]) -> list[InboxItem]:
        """Everything that has come. Unless the loop is `busy` it waits for the first; `on_idle` is called where none
        came for IDLE_SECONDS."""
        if busy and self._queue.empty():
            return []
        try:
            came = [self._queue.get(timeout=IDLE_SECONDS)]
        except Empty:
            on_idle()
            return []
        while not self._queue.empty():
            came.append(self._queue.get_nowait())
        return came
