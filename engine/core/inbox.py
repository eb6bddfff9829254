"""Messages on their way into the step loop: prepared in the thread that brings them, taken between steps.

Knows nothing of steps or sockets, and of the running sequences only whether there are any.
"""

import threading
import time
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple, TypeAlias, TypeVar

import msgspec

from ...core.errors import InvalidArgument, SentError
from ...core.native_calls import CONTROL_FLOW
from ...kvcache.manager import KVCacheManager
from ...scheduler.sequence import SequenceSpec
from ..grammars.backend import CompiledGrammar
from ..transfer.prefix_client import RemotePrefix
from .constraints import SequenceConstraint, ThinkingLimit
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
        self._grammars = grammars
        self._compiling: set[int] = set()  # keys of requests that wait for a grammar, until they are aborted
        self._lock = threading.Lock()
        self._queue: SimpleQueue[InboxItem] = SimpleQueue()

    def accept(self, message: ToCore) -> None:
        """Take a message, and hash a prompt in the caller's thread. The scheduler judges lengths."""
        if not isinstance(message, AddRequest):
            if isinstance(message, AbortRequests):
                with self._lock:
                    self._compiling.difference_update(message.keys)
            self._queue.put(message)
            return
        arrived = self._clock()
        deadline = arrived + message.timeout if message.timeout > 0 else None
        constrained = message.spec.max_tokens > 0 and (message.constraint is not None or _thinking(message) is not None)
        spec = msgspec.structs.replace(
            message.spec,
            hashes=self._cache.digest(message.spec.identities, message.spec.extras),
            constrained=constrained,
            handed_over=bool(message.handle),
        )
        new = NewRequest(spec, deadline, arrived, handle=message.handle, remote=message.remote)
        if message.constraint is None or not constrained:
            self._queue.put(new._replace(constraint=_constraint(message, None)) if constrained else new)
        elif self._grammars is None:
            parameter = message.constraint.parameter
            error = InvalidArgument(f"{parameter}: this engine knows no grammars", field=parameter)
            self._queue.put(RequestRejected(message.spec.key, SentError.of(error)))
        else:
            with self._lock:
                self._compiling.add(message.spec.key)
            self._grammars.compile(message.constraint).add_done_callback(partial(self._on_compiled, message, new))

    def _on_compiled(self, message: AddRequest, new: NewRequest, compiled: Future[CompiledGrammar]) -> None:
        """Called by the thread that compiled, or at once. An aborted request is forgotten."""
        with self._lock:
            if message.spec.key not in self._compiling:
                return
            self._compiling.remove(message.spec.key)
        try:
            self._queue.put(new._replace(constraint=_constraint(message, compiled.result())))
        except InvalidArgument as error:
            self._queue.put(RequestRejected(message.spec.key, SentError.of(error)))
        except CancelledError:
            return  # the core is being stopped
        except CONTROL_FLOW:
            raise
        except BaseException as error:
            self._queue.put(error)

    def fail(self, error: BaseException) -> None:
        """Let the loop end with this error."""
        self._queue.put(error)

    def reply(self, outcome: AdapterReply) -> None:
        """Give the loop the outcome of loading an adapter."""
        self._queue.put(outcome)

    def call(self, function: Callable[[], R], /) -> Future[R]:
        """Have the loop's thread call it between steps; its outcome."""
        done: Future[R] = Future()
        self._queue.put(LoopCall(function, done))
        return done

    def post(self, function: Callable[[], object], /) -> None:
        """Have the loop's thread call it between steps. An error ends the loop."""
        self._queue.put(LoopCall(function))

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
        return items


def _thinking(message: AddRequest) -> ThinkingLimit | None:
    limited = message.thinking is not None and message.thinking_end
    return ThinkingLimit(message.thinking or 0, message.thinking_end) if limited else None


def _constraint(message: AddRequest, grammar: CompiledGrammar | None) -> SequenceConstraint:
    parameter = "" if message.constraint is None else message.constraint.parameter
    make = None if grammar is None else grammar.matcher
    return SequenceConstraint(make, _thinking(message), parameter, jumps=message.spec.sampling.logprobs is None)
