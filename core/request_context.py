"""The context of one request: opened by an endpoint, carried as an argument to the model, recorded when it ends.

Knows nothing of protocols and models. A request that is refused before any model was found has a context too.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import TracebackType
from typing import Any, NamedTuple, Protocol, Self, TypeAlias, TypeVar

from .errors import Cancelled, CharoniaError, ErrorCode, QueueFull, RequestTimeout, shutdown_error
from .native_calls import CONTROL_FLOW
from .request import FinishReason, Usage
from .sampling import SamplingParams

Headers: TypeAlias = Sequence[tuple[str | bytes, str | bytes]]
"""HTTP headers or gRPC metadata of a request, names in lower case."""


ENSEMBLE_ENDPOINT = "ensemble"
"""The endpoint of an ensemble's requests to its steps: without their answers it has none itself."""


class Outcome(StrEnum):
    """How a request ended. `DONE`: answered, with something other than generated text; `REJECTED`: before any work;
    `ERROR`: after some, by a fault of the server."""

    STOP = "stop"
    LENGTH = "length"
    DONE = "done"
    CANCELLED = "cancelled"
    TIMEOUT = "timeout"
    ERROR = "error"
    REJECTED = "rejected"

    @property
    def answered(self) -> bool:
        """Whether the client got the text that it asked for."""
        return self in (Outcome.STOP, Outcome.LENGTH)


class RequestEnd(NamedTuple):
    """An outcome, and the reason of a refusal or an error."""

    outcome: Outcome
    reason: str = ""


QUEUE_FULL_ENDS = {limit: RequestEnd(Outcome.REJECTED, f"queue_full_{limit}") for limit in ("requests", "tokens")}
"""The refusals that shed load, by the limit reached; all others are about the request or the server's state."""

CANCELLED = RequestEnd(Outcome.CANCELLED)
DONE = RequestEnd(Outcome.DONE)

_MAX_WARNINGS = 64
"""Warnings that are kept: a request may have thousands of reasons for one."""

_MAX_CHILDREN = 128
"""Requests of a request's model that are in its trace: a stream through an ensemble has no end."""

_REFUSALS = (ErrorCode.INVALID_ARGUMENT, ErrorCode.NOT_FOUND, ErrorCode.UNSUPPORTED, ErrorCode.UNAUTHENTICATED)
"""Error codes that blame the request, at whatever point they are raised."""

_WORST_FIRST = (
    Outcome.ERROR,
    Outcome.TIMEOUT,
    Outcome.REJECTED,
    Outcome.CANCELLED,
    Outcome.LENGTH,
    Outcome.STOP,
    Outcome.DONE,
)
"""Precedence of outcomes: a request whose sequences ended differently has the first of theirs."""


class SequenceRecord(Protocol):
    """The record of one sequence that was made for a request. Times are of `time.monotonic`, None until they come.

    `opened`: the model received it; `submitted`: the engine did, tokenized; `begun`: its first step began; `first` and
    `last`: its first and latest tokens arrived. `choice` numbers the answers to one prompt.
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
    """All sequences of a request as one: tokens added up, each prompt counted once, the earliest and latest times; None
    for values that no sequence has."""

    choices: int = 0
    prompt: int | None = None
    cached: int | None = None
    generated: int = 0
    submitted: float | None = None
    begun: float | None = None
    first: float | None = None
    last: float | None = None


class ExecutionTimes(NamedTuple):
    """Times of a classic model's request, by `time.monotonic_ns`: it was `queued`, its execution `begun`. `spent`:
    nanoseconds that preparing inputs, computing, and splitting outputs took."""

    queued: int
    begun: int
    spent: tuple[int, int, int]


@dataclass(slots=True, eq=False)
class RequestContext:
    """One request from its arrival at an endpoint to its end; a context manager that closes itself.

    Lives in one event loop. An exception that leaves its block, or `fail`, makes the request's `end` an error; the ends
    of its `sequences` or `finish` make it an answer; without any of them the client left. `ended_at` and `end` are set
    from `close` on.

    `tenant`, `tenant_weight`: the client's, and its fair share beside other tenants. `model`, `version`: as asked for,
    and as resolved once they are found (`model_found`). `answered_at`: when a model without sequences had answered, 0
    if none did; `execution`: the times of its work. `all_sequences`: those of this request and of the requests that its
    model made of other models, as they began. `id` is the protocol's request id, `client_id` the header X-Request-Id,
    `client` the address that the connection came from, without the port.
    `adapter`: the LoRA adapter that answers, by the name that the model was asked for by or by a parameter; empty for
    the model itself. `route`: the route that the request was for, empty for a model.
    `counted`: the model has counted its end. `trace`: telemetry's data for a trace file, once the request is `sampled`;
    `trace_id`, `span_id`: of its span, once somebody was told, or it was made. `depth`: requests of models that this
    one was made for, one for another. `parent`: of a request that a model made; `children`: where traces are made, the
    first of those that ended before this one. `background`: no client waits for the answer, so all others come first.
    `warnings`: what the client is told beside the answer, of this request and of those that its model made.
    `body`: the members of a body that was parsed before the model is looked up, until it was; routes may go by them.
    `prompt_count`, `choice_count`: as `GenerateRequest` has them, where they are known before the model is looked up.
    `logged`: another process logs its end. `ask_to_end`: asks the model to end by itself, which its reader then waits
    for, and returns whether it was asked; None where a reader can only leave.
    """

    endpoint: str
    headers: Headers = ()
    id: str = ""
    client_id: str = ""
    client: str = ""
    tenant: str = ""
    tenant_weight: float = 1.0
    model: str = ""
    version: str = ""
    model_found: bool = False
    adapter: str = ""
    arrived_at: float = field(default_factory=time.monotonic)
    answered_at: float = 0.0
    ended_at: float = field(init=False)
    execution: ExecutionTimes | None = None
    sequences: list[SequenceRecord] = field(default_factory=list)
    all_sequences: list[SequenceRecord] = field(default_factory=list)
    end: RequestEnd | None = None
    counted: bool = False
    sampled: bool = False
    trace_id: str = ""
    span_id: str = ""
    trace: object | None = None
    depth: int = 0
    parent: "RequestContext | None" = None
    children: "list[RequestContext] | None" = None
    warnings: list[str] = field(default_factory=list)
    closed: bool = False
    background: bool = False
    route: str = ""
    body: Mapping[str, Any] | None = None
    prompt_count: int = 1
    choice_count: int = 1
    logged: bool = False
    ask_to_end: Callable[[], bool] | None = None
    _summary: RequestSummary | None = None
    _end_listeners: list[Callable[["RequestContext"], None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ended_at = self.arrived_at

    def child(self, endpoint: str) -> "RequestContext":
        """The context of a request that this one's model makes of another model, for the same client."""
        # What a stream's passes cost: naming all at once is half of setting them one by one.
        return RequestContext(
            endpoint,
            self.headers,
            self.id,
            self.client_id,
            self.client,
            self.tenant,
            self.tenant_weight,
            trace_id=self.trace_id,
            all_sequences=self.all_sequences,
            depth=self.depth + 1,
            parent=self,
            children=None if self.children is None else [],
            background=self.background,
            warnings=self.warnings,
        )

    def adopt(self, child: "RequestContext") -> None:
        """Make a context that was just opened that of a request which this one's model makes of another model."""
        child.parent, child.client = self, self.client
        child.tenant, child.tenant_weight, child.trace_id = self.tenant, self.tenant_weight, self.trace_id
        child.all_sequences, child.depth = self.all_sequences, self.depth + 1
        child.background = self.background
        child.warnings = self.warnings
        child.children = None if self.children is None else []

    @property
    def arm(self) -> str:
        """The model and the version that serve a request for a route; empty for a request for a model."""
        return f"{self.model}:{self.version}" if self.route else ""

    @property
    def traced_in_parent(self) -> bool:
        """Whether an ended request is told of in the trace of its parent."""
        siblings = None if self.parent is None else self.parent.children
        return siblings is not None and any(each is self for each in siblings)

    def add_sequence(self, record: SequenceRecord) -> None:
        self.sequences.append(record)
        self.all_sequences.append(record)

    def warn(self, message: str) -> None:
        """Tell the client, once, unless the answer has begun."""
        if len(self.warnings) < _MAX_WARNINGS and message not in self.warnings:
            self.warnings.append(message)

    @property
    def usage(self) -> Usage:
        """The tokens of all its sequences so far, and those of the requests made of it; each prompt counts once."""
        firsts = [each for each in self.all_sequences if each.choice == 0]
        return Usage(
            sum(each.prompt or 0 for each in firsts),
            sum(each.generated for each in self.all_sequences),
            sum(each.cached or 0 for each in firsts),
        )

    def on_end(self, listener: Callable[["RequestContext"], None]) -> None:
        """Call `listener` with this context when the request has ended; the last one added is called first."""
        self._end_listeners.append(listener)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_fault = error is not None and not isinstance(error, CONTROL_FLOW)
        failure = error if is_fault else shutdown_error(error)
        if failure is not None:
            self.fail(failure)
        self.close()

    def finish(self) -> None:
        """Record that a model without sequences has answered."""
        self.answered_at = time.monotonic()
        self._set_worse_end(DONE)

    def fail(self, error: BaseException) -> None:
        """Record that the request could not be answered, or not completely."""
        self._set_worse_end(end_for_error(error, any(each.submitted is not None for each in self.sequences)))

    def close(self) -> RequestEnd:
        """End the request: nothing more is sent. Without an outcome by now, the client left."""
        for sequence in self.sequences:
            self._set_worse_end(sequence.end or CANCELLED)
        self.ended_at = time.monotonic()
        self.end = end = self.end or CANCELLED
        parent = self.parent
        siblings = None if parent is None or parent.closed else parent.children
        if siblings is not None and len(siblings) < _MAX_CHILDREN:
            siblings.append(self)
        while self._end_listeners:
            self._end_listeners.pop()(self)
        self.closed = True
        return end

    def _set_worse_end(self, end: RequestEnd) -> None:
        if self.end is None or _WORST_FIRST.index(end.outcome) < _WORST_FIRST.index(self.end.outcome):
            self.end = end

    @property
    def summary(self) -> RequestSummary:
        """The sequences' records as one, of a closed context."""
        if self._summary is None:
            self._summary = _summarise(self.sequences)
        return self._summary


def _summarise(records: list[SequenceRecord]) -> RequestSummary:
    if not records:
        return RequestSummary()
    if len(records) == 1:
        [one] = records
        return RequestSummary(1, one.prompt, one.cached, one.generated, one.submitted, one.begun, one.first, one.last)
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
    known = [value for value in values if value is not None]
    return fold(known) if known else None


def end_for_error(error: BaseException, submitted: bool) -> RequestEnd:
    """The end of a request that raised `error`; `submitted`: an engine has the request."""
    if isinstance(error, QueueFull):
        return QUEUE_FULL_ENDS[error.limit]
    if isinstance(error, RequestTimeout):
        return RequestEnd(Outcome.TIMEOUT)
    if isinstance(error, Cancelled):
        return CANCELLED
    code = error.code if isinstance(error, CharoniaError) else ErrorCode.INTERNAL
    refused = code in _REFUSALS or (code is ErrorCode.UNAVAILABLE and not submitted)
    return RequestEnd(Outcome.REJECTED if refused else Outcome.ERROR, code.value.lower())
