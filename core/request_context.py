"""One request, from its arrival at a door to its end, whatever becomes of it.

Knows nothing of protocols and models. Who serves a request finds its exchange by `current_request()`: a refusal before
any model was found leaves one as well as an answer does.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar, Token
from types import TracebackType
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeAlias, TypeVar

from .errors import Cancelled, CharoniaError, ErrorCode, QueueFull, RequestTimeout, shutdown_error
from .metrics import QUEUE_FULL_ENDS, Outcome, RequestEnd
from .request import FinishReason, SamplingParams

if TYPE_CHECKING:
    from ..telemetry.request_trace import RequestTrace

Headers: TypeAlias = Sequence[tuple[str | bytes, str | bytes]]
"""What a client sent along: HTTP headers or gRPC metadata, names in lower case."""

CANCELLED = RequestEnd(Outcome.CANCELLED)
DONE = RequestEnd(Outcome.DONE)

_REFUSALS = (ErrorCode.INVALID_ARGUMENT, ErrorCode.NOT_FOUND, ErrorCode.UNSUPPORTED, ErrorCode.UNAUTHENTICATED)
"""Codes that blame the request, whenever they come."""

_WORST_FIRST = (
    Outcome.ERROR,
    Outcome.TIMEOUT,
    Outcome.REJECTED,
    Outcome.CANCELLED,
    Outcome.LENGTH,
    Outcome.STOP,
    Outcome.DONE,
)
"""Which outcome a request has whose parts ended differently: the first of these."""


class SequenceRecord(Protocol):
    """What an exchange needs to know of each sequence made for it. Times are of `time.monotonic`, None until then.

    `opened`: the model got it; `submitted`: the engine did, tokenized; `begun`: its first step began; `first` and
    `last`: tokens came. `choice` numbers the answers to one prompt.
    """

    choice: int
    sampling: SamplingParams
    opened: float
    submitted: float | None
    begun: float | None
    first: float | None
    last: float | None
    prompt: int | None
    cached: int | None
    generated: int
    finish_reason: FinishReason | None
    end: RequestEnd | None


class RequestSummary(NamedTuple):
    """All parts of an exchange as one: tokens added up, each prompt counted once, and the earliest and latest times.

    What never came is None.
    """

    choices: int
    prompt: int | None
    cached: int | None
    generated: int
    submitted: float | None
    begun: float | None
    first: float | None
    last: float | None


class ExecutionTimes(NamedTuple):
    """When a model without parts did what, nanoseconds of `time.monotonic_ns`: the request was `queued`, its execution
    `begun`. `spent`: how long it took to prepare inputs, to compute, and to take outputs apart."""

    queued: int
    begun: int
    spent: tuple[int, int, int]


class RequestContext:
    """Opened by a door, filled in by whoever learns something, closed once. Lives in one event loop.

    `model` and `version` are as asked for until they are found; `found`: they were. `end` and `ended` are there from
    `close` on; the end is that of the parts, or for want of parts what `finish` or `fail` said, and `computed` when;
    `answered`: when its answer was there, 0 if it has parts or there was none. `id` is the protocol's name for it,
    `client_id` the one in its `X-Request-Id`. `trace`: what it leaves in a file, once it is `sampled`.
    """

    __slots__ = (
        "_summary",
        "answered_at",
        "arrived_at",
        "client_id",
        "end",
        "ended_at",
        "endpoint",
        "execution",
        "headers",
        "id",
        "model",
        "model_found",
        "sampled",
        "sequences",
        "tenant",
        "trace",
        "trace_id",
        "version",
    )

    def __init__(self, door: str, headers: Headers = ()) -> None:
        self.endpoint = door
        self.headers = headers
        self.id = self.client_id = self.tenant = self.model = self.version = self.trace_id = ""
        self.model_found = self.sampled = False
        self.trace: RequestTrace | None = None
        self.arrived_at = self.ended_at = time.monotonic()
        self.answered_at = 0.0
        self.sequences: list[SequenceRecord] = []
        self.end: RequestEnd | None = None
        self.execution: ExecutionTimes | None = None
        self._summary: RequestSummary | None = None

    def finish(self) -> None:
        """It was answered, with something that has no parts."""
        self.answered_at = time.monotonic()
        self._set_worse_end(DONE)

    def fail(self, error: Exception) -> None:
        """It could not be answered, or not to its end."""
        self._set_worse_end(end_for_error(error, any(part.submitted is not None for part in self.sequences)))

    def close(self) -> RequestEnd:
        """Nothing more is sent. Without an end by now, the reader left."""
        for part in self.sequences:
            self._set_worse_end(part.end or CANCELLED)
        self.ended_at = time.monotonic()
        self.end = self.end or CANCELLED
        return self.end

    def _set_worse_end(self, end: RequestEnd) -> None:
        if self.end is None or _WORST_FIRST.index(end.outcome) < _WORST_FIRST.index(self.end.outcome):
            self.end = end

    @property
    def summary(self) -> RequestSummary:
        """Of a closed exchange."""
        if self._summary is None:
            self._summary = _summary(self.sequences)
        return self._summary


_NO_PARTS = RequestSummary(0, None, None, 0, None, None, None, None)


def _summary(parts: list[SequenceRecord]) -> RequestSummary:
    if not parts:
        return _NO_PARTS
    if len(parts) == 1:
        [one] = parts
        return RequestSummary(1, one.prompt, one.cached, one.generated, one.submitted, one.begun, one.first, one.last)
    asked = [part for part in parts if part.choice == 0]
    return RequestSummary(
        choices=len(parts),
        prompt=_folded(sum, [part.prompt for part in asked]),
        cached=_folded(sum, [part.cached for part in asked]),
        generated=sum(part.generated for part in parts),
        submitted=_folded(min, [part.submitted for part in parts]),
        begun=_folded(min, [part.begun for part in parts]),
        first=_folded(min, [part.first for part in parts]),
        last=_folded(max, [part.last for part in parts]),
    )


_Number = TypeVar("_Number", int, float)


def _folded(fold: Callable[[list[_Number]], _Number], values: list[_Number | None]) -> _Number | None:
    known = [value for value in values if value is not None]
    return fold(known) if known else None


def end_for_error(error: Exception, submitted: bool) -> RequestEnd:
    """The end that an error is to a request of which an engine has, or has not, been told."""
    if isinstance(error, QueueFull):
        return QUEUE_FULL_ENDS[error.limit]
    if isinstance(error, RequestTimeout):
        return RequestEnd(Outcome.TIMEOUT)
    if isinstance(error, Cancelled):
        return CANCELLED
    code = error.code if isinstance(error, CharoniaError) else ErrorCode.INTERNAL
    refused = code in _REFUSALS or (code is ErrorCode.UNAVAILABLE and not submitted)
    return RequestEnd(Outcome.REJECTED if refused else Outcome.ERROR, code.value.lower())


_current: ContextVar[RequestContext | None] = ContextVar("exchange", default=None)


def current_request() -> RequestContext | None:
    """The exchange that this task serves: that of the door which started it, if it is one that is counted."""
    return _current.get()


class _RequestScope(AbstractContextManager[RequestContext]):
    """A block that serves an exchange. No generator: every request passes here."""

    __slots__ = ("_ended", "_exchange", "_token")
    _token: Token[RequestContext | None]

    def __init__(self, exchange: RequestContext, ended: Callable[[RequestContext], None] | None) -> None:
        self._exchange = exchange
        self._ended = ended

    def __enter__(self) -> RequestContext:
        self._token = _current.set(self._exchange)
        return self._exchange

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        failure = error if isinstance(error, Exception) else shutdown_error(error)
        if failure is not None:
            self._exchange.fail(failure)
        _current.reset(self._token)
        self._exchange.close()
        if self._ended is not None:
            self._ended(self._exchange)


def request_scope(
    exchange: RequestContext, ended: Callable[[RequestContext], None] | None = None
) -> AbstractContextManager[RequestContext]:
    """Makes it the current one of the block, and of the tasks started there; closes it, whatever ends the block, and
    tells `ended`."""
    return _RequestScope(exchange, ended)
