"""The context of one request: an endpoint opens it, models get it as an argument, and it is recorded at the end, even
if no model was found."""

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, TypeVar

import msgspec

from .errors import Cancelled, CharoniaError, ErrorCode, QueueFull, RequestTimeout, shutdown_error
from .native_calls import CONTROL_FLOW
from .request import FinishReason, Usage
from .sampling import SamplingParams

T = TypeVar("T")

Headers: TypeAlias = Sequence[tuple[str | bytes, str | bytes]]
"""HTTP headers or gRPC metadata of a request, names in lower case."""


ENSEMBLE_ENDPOINT = "ensemble"
"""The endpoint of requests that an ensemble makes to its steps."""


class Outcome(StrEnum):
    """How a request ended: `DONE` is answered without generated text, `REJECTED` is before any work, `ERROR` is by a
    fault of the server after some work, `CACHE_THRESHOLD` as its client wanted, for others have more of it cached."""

    STOP = "stop"
    LENGTH = "length"
    DONE = "done"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"
    REJECTED = "rejected"
    CACHE_THRESHOLD = "cache_threshold"

    @property
    def answered(self) -> bool:
        """Whether the client got the text that it asked for."""
        return self in (Outcome.STOP, Outcome.LENGTH)


class RequestEnd(NamedTuple):
    """An outcome, and the reason of a refusal or an error."""

    outcome: Outcome
    reason: str = ""


QUEUE_FULL_ENDS = {limit: RequestEnd(Outcome.REJECTED, f"queue_full_{limit}") for limit in ("requests", "tokens")}
"""The refusals that shed load, by the limit that was reached."""

CANCELLED = RequestEnd(Outcome.CANCELLED)
DONE = RequestEnd(Outcome.DONE)

_MAX_WARNINGS = 64
"""The most warnings of one request."""

_MAX_CHILDREN = 128
"""The most child requests in one trace, since streams through ensembles may not end."""

_REFUSALS = (ErrorCode.INVALID_ARGUMENT, ErrorCode.NOT_FOUND, ErrorCode.UNSUPPORTED, ErrorCode.UNAUTHENTICATED)
"""Error codes that blame the request, whenever they are raised."""

_WORST_FIRST = (
    Outcome.ERROR,
    Outcome.TIMEOUT,
    Outcome.REJECTED,
    Outcome.CANCELLED,
    Outcome.CACHE_THRESHOLD,
    Outcome.LENGTH,
    Outcome.STOP,
    Outcome.DONE,
)
"""Precedence of outcomes among the sequences of one request; each has a place."""


class SequenceRecord(Protocol):
    """The record of one sequence of a request. Times are of `time.monotonic`, None until they come."""

    choice: int
    """The number of this answer to its prompt."""
    sampling: SamplingParams
    opened: float
    """When the model received it."""
    submitted: float | None
    """When the engine got it, tokenized."""
    begun: float | None
    """When its first step began."""
    first: float | None
    """When its first token arrived."""
    last: float | None
    """When its latest token arrived."""
    prompt: int | None
    cached: int | None
    generated: int
    finish_reason: FinishReason | None
    end: RequestEnd | None


class RequestSummary(NamedTuple):
    """The sequences of a request as one: added tokens, with each prompt counted once, and the earliest and latest
    times. None if no sequence has the value."""

    choices: int = 0
    prompt: int | None = None
    cached: int | None = None
    generated: int = 0
    submitted: float | None = None
    begun: float | None = None
    first: float | None = None
    last: float | None = None


class ExecutionTimes(msgspec.Struct, frozen=True):
    """Times of a classic model's request, by `time.monotonic_ns`: when it was queued, and when its execution began.
    `spent` is the nanoseconds of preparing inputs, computing and splitting outputs."""

    queued: int
    begun: int
    spent: tuple[int, int, int]


class GatewayHints(msgspec.Struct, frozen=True, array_like=True):
    """What a gateway that is believed says of a request to a language model."""

    priority: int | None = None
    """Its class, in place of the request's own."""
    target_ttft_ms: float = 0.0
    """Milliseconds to the first token that are wanted, where the request says nothing; 0 is no target."""
    target_itl_ms: float = 0.0
    """Likewise between tokens."""
    session: str = ""


NO_HINTS = GatewayHints()


@dataclass(slots=True, eq=False)
class RequestContext:
    """One request from arrival to end; a context manager that closes itself, in one event loop. An exception in its
    block, or `fail`, makes it fail; the ends of its `sequences`, or `finish`, make it answered; otherwise the client
    left."""

    endpoint: str
    headers: Headers = ()
    id: str = ""
    """The protocol's request id."""
    client_id: str = ""
    """The header X-Request-Id."""
    client: str = ""
    """The client's address, without the port."""
    tenant: str = ""
    tenant_weight: float = 1.0
    """The tenant's fair share beside other tenants."""
    hints: GatewayHints = NO_HINTS
    model: str = ""
    """The name that was asked for."""
    version: str = ""
    """The version that was asked for; once the model is found, the one that answers."""
    model_found: bool = False
    adapter: str = ""
    """The LoRA adapter that answers, if any."""
    arrived_at: float = field(default_factory=time.monotonic)
    answered_at: float = 0.0
    """When a model without sequences had answered; 0 before."""
    ended_at: float = field(init=False)
    """Final once the context is closed, as `end` is."""
    execution: ExecutionTimes | None = None
    """The times of a classic model's work."""
    sequences: list[SequenceRecord] = field(default_factory=list)
    all_sequences: list[SequenceRecord] = field(default_factory=list)
    """The sequences of this request and of its children."""
    end: RequestEnd | None = None
    counted: bool = False
    """Whether the model has counted its end."""
    sampled: bool = False
    """Whether it is in a trace file."""
    trace_id: str = ""
    """The trace id of its span, once that is needed."""
    span_id: str = ""
    trace: object | None = None
    """Telemetry's data for a trace file."""
    depth: int = 0
    """How many requests of models it was made for, each for the next."""
    parent: "RequestContext | None" = None
    """The request whose model made this one."""
    children: "list[RequestContext] | None" = None
    """The first requests that its model made and that have ended; None without traces."""
    warnings: list[str] = field(default_factory=list)
    """Texts for the client beside the answer, shared with all its children."""
    closed: bool = False
    background: bool = False
    """No client waits for the answer, so all other requests come first."""
    waits_for_room: bool = False
    """Whether it waits where a full queue would refuse it: it is one of a list that its program has answered."""
    route: str = ""
    """The route that was asked for; empty for a model."""
    body: Mapping[str, Any] | None = None
    """The parsed body, which routes may go by, until the model is looked up."""
    prompt_count: int = 1
    """As in `GenerateRequest`."""
    choice_count: int = 1
    """As in `GenerateRequest`."""
    logged: bool = False
    """Another process logs its end."""
    ask_to_end: Callable[[], bool] | None = None
    """Asks the model to end early and returns whether it will; its reader then waits for that. None if a reader can
    only leave."""
    _summary: RequestSummary | None = None
    _end_listeners: list[Callable[["RequestContext"], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ended_at = self.arrived_at

    def seconds_left(self, timeout: float) -> float:
        """The rest of so many seconds since it arrived; 0 is no limit."""
        return timeout - (time.monotonic() - self.arrived_at) if timeout else math.inf

    async def in_time(self, work: Awaitable[T], timeout: float) -> T:
        """What `work` gives. Raises `RequestTimeout` when so many seconds since it arrived are over; 0 is no limit."""
        try:
            async with asyncio.timeout(self.seconds_left(timeout) if timeout else None) as limit:
                return await work
        except TimeoutError as error:
            raise (RequestTimeout if limit.expired() else error) from None

    def child(self, endpoint: str) -> "RequestContext":
        """The context of a request that this one's model makes to another model, for the same client."""
        # What a stream's passes cost: naming all at once is half of setting them one by one.
        return RequestContext(
            endpoint,
            self.headers,
            self.id,
            self.client_id,
            self.client,
            self.tenant,
            self.tenant_weight,
            self.hints,
            trace_id=self.trace_id,
            all_sequences=self.all_sequences,
            depth=self.depth + 1,
            parent=self,
            children=None if self.children is None else [],
            background=self.background,
            warnings=self.warnings,
        )

    def adopt(self, child: "RequestContext") -> None:
        """Make `child`, which was just opened, a child of this request."""
        child.parent = self
        child.client = self.client
        child.tenant = self.tenant
        child.tenant_weight = self.tenant_weight
        child.hints = self.hints
        child.trace_id = self.trace_id
        child.all_sequences = self.all_sequences
        child.depth = self.depth + 1
        child.background = self.background
        child.warnings = self.warnings
        child.children = None if self.children is None else []

    @property
    def arm(self) -> str:
        """The model and version that serve a route's request; empty if no route was asked for."""
        return f"{self.model}:{self.version}" if self.route else ""

    @property
    def traced_in_parent(self) -> bool:
        """Whether an ended request is in its parent's trace."""
        siblings = None if self.parent is None else self.parent.children
        return siblings is not None and any(sibling is self for sibling in siblings)

    def add_sequence(self, record: SequenceRecord) -> None:
        self.sequences.append(record)
        self.all_sequences.append(record)

    def warn(self, message: str) -> None:
        """Tell the client once, unless the answer has begun."""
        if len(self.warnings) < _MAX_WARNINGS and message not in self.warnings:
            self.warnings.append(message)

    @property
    def usage(self) -> Usage:
        """The tokens so far of all sequences, its children's too; each prompt counts once."""
        first_choices = [sequence for sequence in self.all_sequences if sequence.choice == 0]
        return Usage(
            sum(sequence.prompt or 0 for sequence in first_choices),
            sum(sequence.generated for sequence in self.all_sequences),
            sum(sequence.cached or 0 for sequence in first_choices),
        )

    def on_end(self, listener: Callable[["RequestContext"], None]) -> None:
        """Call `listener` when the request has ended; the last one added is called first."""
        self._end_listeners.append(listener)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            failure = shutdown_error(error) if isinstance(error, CONTROL_FLOW) else error
            if failure is not None:
                self.fail(failure)
        self.close()

    def finish(self) -> None:
        """Record that a model without sequences has answered."""
        self.answered_at = time.monotonic()
        self.end = self.end or DONE

    def fail(self, error: BaseException) -> None:
        """Record that the request could not be answered, or not completely."""
        self._set_worse_end(end_for_error(error, any(sequence.submitted is not None for sequence in self.sequences)))

    def close(self) -> RequestEnd:
        """End the request. Without an outcome, the client left. All listeners hear of it, whatever one raises."""
        for sequence in self.sequences:
            self._set_worse_end(sequence.end or CANCELLED)
        self.ended_at = time.monotonic()
        self.end = end = self.end or CANCELLED
        parent = self.parent
        siblings = None if parent is None or parent.closed else parent.children
        if siblings is not None and len(siblings) < _MAX_CHILDREN:
            siblings.append(self)
        try:
            self._tell_listeners()
        finally:
            self.closed = True
        return end

    def _tell_listeners(self) -> None:
        try:
            while self._end_listeners:
                self._end_listeners.pop()(self)
        finally:
            if self._end_listeners:
                self._tell_listeners()

    def _set_worse_end(self, end: RequestEnd) -> None:
        if self.end is None or _WORST_FIRST.index(end.outcome) < _WORST_FIRST.index(self.end.outcome):
            self.end = end

    @property
    def summary(self) -> RequestSummary:
        """The sequences of a closed context as one."""
        if self._summary is None:
            self._summary = _summarise(self.sequences)
        return self._summary


def _summarise(records: list[SequenceRecord]) -> RequestSummary:
    if not records:
        return RequestSummary()
    if len(records) == 1:
        [record] = records
        return RequestSummary(
            1, record.prompt, record.cached, record.generated, record.submitted, record.begun, record.first, record.last
        )
    first_choices = [record for record in records if record.choice == 0]
    return RequestSummary(
        choices=len(records),
        prompt=_fold_known(sum, [record.prompt for record in first_choices]),
        cached=_fold_known(sum, [record.cached for record in first_choices]),
        generated=sum(record.generated for record in records),
        submitted=_fold_known(min, [record.submitted for record in records]),
        begun=_fold_known(min, [record.begun for record in records]),
        first=_fold_known(min, [record.first for record in records]),
        last=_fold_known(max, [record.last for record in records]),
    )


_Number = TypeVar("_Number", int, float)


def _fold_known(fold: Callable[[list[_Number]], _Number], values: list[_Number | None]) -> _Number | None:
    known_values = [value for value in values if value is not None]
    return fold(known_values) if known_values else None


def end_for_error(error: BaseException, submitted: bool) -> RequestEnd:
    """The end of a request that raised `error`; `submitted`: an engine had it."""
    if isinstance(error, QueueFull):
        return QUEUE_FULL_ENDS[error.limit]
    if isinstance(error, RequestTimeout):
        return RequestEnd(Outcome.TIMEOUT)
    if isinstance(error, Cancelled):
        return CANCELLED
    code = error.code if isinstance(error, CharoniaError) else ErrorCode.INTERNAL
    refused = code in _REFUSALS or (code is ErrorCode.UNAVAILABLE and not submitted)
    return RequestEnd(Outcome.REJECTED if refused else Outcome.ERROR, code.value.lower())
