"""Messages on their way into the step loop: prepared in the thread that brings them, taken between steps.

Knows nothing of steps or sockets, and of the running sequences only whether there are any.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from ...core.errors import InvalidArgument, SentError
from ...kvcache.manager import KVCacheManager
from ...scheduler.sequence import SequenceSpec
from ..transfer.prefix_client import RemotePrefix
from .constraints import SequenceConstraint
from .grammar_pool import GrammarPool
from .messages import (
    AbortRequests,
    AdapterReply,
    AddRequest,
    LoadAdapter,
    PatientWorkWaits,
    ReleaseScope,
    RequestRejected,
    Shutdown,
    ToCore,
    UnloadAdapter,
)
from .request_constraints import RequestConstraints

R = TypeVar("R")

IDLE_SECONDS = 1.0
"""An idle loop turns, and sends its heartbeat, at least this often."""


class NewRequest(NamedTuple):
    """A sequence to run."""

    spec: SequenceSpec
    deadline: float | None
    """By the inbox's clock; None for no limit."""
    arrived: float
    """By the inbox's clock."""
    constraint: SequenceConstraint | None = None
    handle: str = ""
    """As in `AddRequest`, as the next."""
    remote: RemotePrefix | None = None


class LoopCall(NamedTuple):
    """Something that another thread wants done between steps."""

    function: Callable[[], Any]
    done: Future[Any] | None = None
    """Gets the outcome. None: nobody waits for it, and an error ends the loop."""

    def run(self) -> None:
        if self.done is None:
            self.function()
            return
        if not self.done.set_running_or_notify_cancel():
            return
        try:
            self.done.set_result(self.function())
        except Exception as error:
            self.done.set_exception(error)


InboxItem: TypeAlias = (
    LoopCall
    | NewRequest
    | RequestRejected
    | AbortRequests
    | ReleaseScope
    | LoadAdapter
    | UnloadAdapter
    | AdapterReply
    | PatientWorkWaits
    | Shutdown
    | BaseException
)


class Inbox:
    """The messages that the loop has not taken. `take_all` is for the loop's thread, all else for any. `clock`:
    seconds, for timeouts. Requests wait for their `grammars` without holding up others."""

    def __init__(
        self,
        cache: KVCacheManager,
        clock: Callable[[], float] = time.monotonic,
        grammars: GrammarPool | None = None,
    ) -> None:
        self._cache = cache
        self._clock = clock
        self._constraints = RequestConstraints(grammars)
        self._queue: SimpleQueue[InboxItem] = SimpleQueue()
        self._others = 0  # items of the queue that are no requests
        self._changed = threading.Condition()

    def accept(self, message: ToCore) -> None:
        """Take a message, and hash a prompt in the caller's thread. The scheduler judges lengths."""
        if not isinstance(message, AddRequest):
            if isinstance(message, AbortRequests):
                self._constraints.forget(message.keys)
            self._put(message)
            return
        arrived = self._clock()
        deadline = arrived + message.timeout if message.timeout > 0 else None
        spec = msgspec.structs.replace(
            message.spec,
            hashes=self._cache.digest(message.spec.identities, message.spec.extras),
            constrained=message.is_constrained,
            handed_over=bool(message.handle),
        )
        new = NewRequest(spec, deadline, arrived, handle=message.handle, remote=message.remote)
        if message.is_constrained:
            self._constraints.make(message, partial(self._take_constrained, new))
        else:
            self._queue.put(new)

    def _take_constrained(self, new: NewRequest, outcome: SequenceConstraint | BaseException) -> None:
        if isinstance(outcome, SequenceConstraint):
            self._queue.put(new._replace(constraint=outcome))
        elif isinstance(outcome, InvalidArgument):
            self._put(RequestRejected(new.spec.key, SentError.of(outcome)))
        else:
            self._put(outcome)

    def fail(self, error: BaseException) -> None:
        """Let the loop end with this error."""
        self._put(error)

    def reply(self, outcome: AdapterReply) -> None:
        """Give the loop the outcome of loading an adapter."""
        self._put(outcome)

    def call(self, function: Callable[[], R], /) -> Future[R]:
        """Have the loop's thread call it between steps; its outcome."""
        done: Future[R] = Future()
        self._put(LoopCall(function, done))
        return done

    def post(self, function: Callable[[], object], /) -> None:
        """Have the loop's thread call it between steps. An error ends the loop."""
        self._put(LoopCall(function))

    def pause(self, seconds: float) -> None:
        """Wait so long, or until something comes that is no request: what is aborted holds its blocks no longer than
        the step."""
        with self._changed:
            self._changed.wait_for(lambda: self._others, seconds)

    def _put(self, item: InboxItem) -> None:
        with self._changed:
            self._queue.put(item)
            self._others += 1
            self._changed.notify()

    def take_all(self, busy: bool, patience: float = IDLE_SECONDS) -> list[InboxItem]:
        """All messages. Unless the loop is `busy`, it waits for the first, `patience` or IDLE_SECONDS at most."""
        if busy and self._queue.empty():
            return []
        try:
            items = [self._queue.get(timeout=min(patience, IDLE_SECONDS))]
        except Empty:
            return []
        while not self._queue.empty():
            items.append(self._queue.get_nowait())
        others = sum(not isinstance(item, NewRequest) for item in items)
        if others:
            with self._changed:
                self._others -= others
        return items
